"""The losses that train the indexer, over all keys and over lists of them."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.loss import generic, sm90
from mla_cupy.kernels.indexer.loss.head_sums_pipeline import HEAD_SUMS
from mla_cupy.kernels.indexer.loss.list_pipeline import SPARSE_LOSS
from mla_cupy.kernels.indexer.loss.pipeline import LOSS
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "HEAD_SUMS",
    "KERNELS",
    "LOSS",
    "SPARSE_LOSS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    *generic.KERNELS,
    *sm90.KERNELS,
)
