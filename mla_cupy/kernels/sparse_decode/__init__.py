"""Sparse decode from FP8 records."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_decode import generic, schedule, sm90, sm90_small
from mla_cupy.kernels.sparse_decode.pipeline import SPARSE_DECODE
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_DECODE",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    generic.KERNEL,
    schedule.KERNEL,
    sm90.KERNEL,
    sm90_small.KERNEL,
)
