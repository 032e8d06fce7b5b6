"""Sparse attention, backward."""

from mla_cupy.kernels.sparse_backward import delta, dkv, sink
from mla_cupy.kernels.sparse_backward.pipeline import SPARSE_BACKWARD

__all__ = ["KERNELS", "SPARSE_BACKWARD"]

KERNELS = (
    *SPARSE_BACKWARD.kernels,
    *(module.KERNEL for module in (delta, sink, dkv)),
)
