"""Sparse attention, forward."""

from mla_cupy.kernels.sparse import rows
from mla_cupy.kernels.sparse.pipeline import GENERIC, SPARSE_FORWARD

__all__ = ["KERNELS", "SPARSE_FORWARD"]

KERNELS = (*(kernel for kernel in SPARSE_FORWARD.kernels if kernel is not GENERIC), rows.KERNEL)
