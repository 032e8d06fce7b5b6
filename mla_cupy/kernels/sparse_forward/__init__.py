"""Sparse attention, forward."""

from mla_cupy.kernels.sparse_forward.pipeline import SPARSE_FORWARD

__all__ = ["KERNELS", "SPARSE_FORWARD"]

KERNELS = SPARSE_FORWARD.kernels
