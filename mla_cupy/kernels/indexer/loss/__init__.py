"""The losses that train the indexer, over all keys and over lists of them."""
# Written by `python -m tests.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.loss import (
    bounds,
    finite_keys,
    finite_values,
    generic_attention,
    generic_keys,
    generic_queries,
    generic_scatter,
    generic_scores,
    head_sums,
    keys_sum,
    ranges,
    rows,
    sm90_head_keys,
    sm90_head_queries,
    sm90_heads,
    sm90_keys,
    sm90_list_gradients,
    sm90_list_lse,
    sm90_list_scores,
    sm90_lse,
    sm90_queries,
    sm90_scores,
)
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
    bounds.KERNEL,
    finite_keys.KERNEL,
    finite_values.KERNEL,
    generic_attention.KERNEL,
    generic_keys.KERNEL,
    generic_queries.KERNEL,
    generic_scatter.KERNEL,
    generic_scores.KERNEL,
    head_sums.KERNEL,
    keys_sum.KERNEL,
    ranges.KERNEL,
    rows.KERNEL,
    sm90_head_keys.KERNEL,
    sm90_head_queries.KERNEL,
    sm90_heads.KERNEL,
    sm90_keys.KERNEL,
    sm90_list_gradients.KERNEL,
    sm90_list_lse.KERNEL,
    sm90_list_scores.KERNEL,
    sm90_lse.KERNEL,
    sm90_queries.KERNEL,
    sm90_scores.KERNEL,
)
