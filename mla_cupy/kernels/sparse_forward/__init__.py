"""Sparse attention, forward."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_forward import records, sm90, sm90_fp8, sm100
from mla_cupy.kernels.sparse_forward.pipeline import SPARSE_FORWARD
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_FORWARD",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    *records.KERNELS,
    *sm100.KERNELS,
    *sm90.KERNELS,
    sm90_fp8.KERNEL,
)
