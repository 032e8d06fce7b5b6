"""Merging partial results."""

from mla_cupy.kernels.merge import exchange
from mla_cupy.kernels.merge.pipeline import MERGE

__all__ = ["KERNELS", "MERGE"]

KERNELS = (*MERGE.kernels, exchange.KERNEL)
