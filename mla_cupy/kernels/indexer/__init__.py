"""The lightning indexer: preparation of queries and keys, their cache, logits, top-k, its losses."""

from typing import Any

from mla_cupy.kernels.indexer import (
    logits_schedule,
    loss_attention_generic,
    loss_bounds,
    loss_finite_keys,
    loss_finite_values,
    loss_head_keys_sm90,
    loss_head_queries_sm90,
    loss_head_sums,
    loss_keys_generic,
    loss_keys_sm90,
    loss_keys_sum,
    loss_list_gradients_sm90,
    loss_list_lse_sm90,
    loss_list_scores_sm90,
    loss_lse_sm90,
    loss_queries_generic,
    loss_queries_sm90,
    loss_ranges,
    loss_rows,
    loss_scatter_generic,
)
from mla_cupy.kernels.indexer.head_sums_pipeline import HEAD_SUMS
from mla_cupy.kernels.indexer.logits_pipeline import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.indexer.loss_pipeline import LOSS
from mla_cupy.kernels.indexer.prepare_pipeline import APPEND_KEYS, GATHER_KEYS, PREPARE_K, PREPARE_Q
from mla_cupy.kernels.indexer.sparse_loss_pipeline import SPARSE_LOSS
from mla_cupy.kernels.indexer.topk_pipeline import TOPK
from mla_cupy.kernels.spec import Kernel

__all__ = [
    "APPEND_KEYS",
    "GATHER_KEYS",
    "HEAD_SUMS",
    "KERNELS",
    "LOGITS",
    "LOGITS_PAGED",
    "LOSS",
    "PREPARE_K",
    "PREPARE_Q",
    "SPARSE_LOSS",
    "TOPK",
]

KERNELS: tuple[Kernel[Any], ...] = (
    *dict.fromkeys((*LOGITS.kernels, *LOGITS_PAGED.kernels)),
    logits_schedule.KERNEL,
    *PREPARE_Q.kernels,
    *GATHER_KEYS.kernels,
    *TOPK.kernels,
    *LOSS.kernels,
    loss_ranges.KERNEL,
    loss_attention_generic.KERNEL,
    loss_rows.KERNEL,
    loss_queries_generic.KERNEL,
    loss_keys_generic.KERNEL,
    loss_finite_keys.KERNEL,
    loss_queries_sm90.KERNEL,
    loss_keys_sm90.KERNEL,
    loss_keys_sum.KERNEL,
    loss_lse_sm90.KERNEL,
    loss_list_lse_sm90.KERNEL,
    loss_finite_values.KERNEL,
    loss_head_queries_sm90.KERNEL,
    loss_head_keys_sm90.KERNEL,
    loss_list_scores_sm90.KERNEL,
    loss_list_gradients_sm90.KERNEL,
    loss_scatter_generic.KERNEL,
    loss_bounds.KERNEL,
    loss_head_sums.KERNEL,
)
