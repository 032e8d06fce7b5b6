"""Sparse attention, forward."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.sparse_forward import generic_records, sm90, sm90_records, sm90_small
from mla_cupy.kernels.sparse_forward.pipeline import SPARSE_FORWARD
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "SPARSE_FORWARD",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    generic_records.KERNEL,
    sm90.KERNEL,
    sm90_records.KERNEL,
    sm90_small.KERNEL,
)
