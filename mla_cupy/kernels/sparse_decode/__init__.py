"""Sparse decode from FP8 records."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_decode import records, schedule, turn_results
from mla_cupy.kernels.sparse_decode.pipeline import SPARSE_DECODE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_DECODE",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    *records.KERNELS,
    schedule.KERNEL,
    turn_results.KERNEL,
)
