"""Sparse attention, backward."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_backward import generic, mma, passes, pieces, sm90, sm90_pair, sm100
from mla_cupy.kernels.sparse_backward.pipeline import SPARSE_BACKWARD
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_BACKWARD",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    generic.KERNEL,
    mma.KERNEL,
    *passes.KERNELS,
    *pieces.KERNELS,
    *sm100.KERNELS,
    sm90.KERNEL,
    sm90_pair.KERNEL,
)
