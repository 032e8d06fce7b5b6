"""Sparse decode from FP8 records."""

from mla_cupy.kernels.sparse_decode import schedule
from mla_cupy.kernels.sparse_decode.pipeline import SPARSE_DECODE

__all__ = ["KERNELS", "SPARSE_DECODE"]

KERNELS = (*SPARSE_DECODE.kernels, schedule.KERNEL)
