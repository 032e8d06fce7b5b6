"""Sparse decode from FP8 records."""

from mla_cupy.kernels.sparse_decode import generic, lists
from mla_cupy.kernels.sparse_decode.pipeline import SPARSE_DECODE

__all__ = ["KERNELS", "SPARSE_DECODE"]

KERNELS = (generic.KERNEL, lists.KERNEL)
