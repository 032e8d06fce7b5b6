"""The specification of every operation, in NumPy and float64, written to be read.

Functions have the names and arguments of the public ones. Every kernel is judged against them, and they answer where
there is no GPU. `layer` holds the textbook MLA layer around the attention.
"""

# ---- Written by `python -m tools.generate`: the oracle's functions
from mla_cupy.reference.cache import cache_append, cache_copy_pages, cache_gather, cache_slots, cache_update
from mla_cupy.reference.dense_decode import cascade_decode, mla_decode
from mla_cupy.reference.indexer_logits import indexer_logits, indexer_logits_paged
from mla_cupy.reference.indexer_loss import (
    SparseLoss,
    WarmupLoss,
    indexer_head_sums,
    indexer_sparse_loss,
    indexer_warmup_loss,
)
from mla_cupy.reference.indexer_records import (
    indexer_cache_append,
    indexer_cache_gather,
    indexer_prepare,
    indexer_prepare_k,
    indexer_prepare_q,
)
from mla_cupy.reference.indexer_select import indexer_select, indexer_select_paged
from mla_cupy.reference.indexer_topk import indexer_topk
from mla_cupy.reference.layer import MlaConfig, MlaWeights, mla_layer, random_weights
from mla_cupy.reference.merge import merge_states
from mla_cupy.reference.prefill import mla_prefill, prefill_mask
from mla_cupy.reference.prefill_backward import mla_prefill_backward
from mla_cupy.reference.preparation import mla_prepare
from mla_cupy.reference.projection import absorb, merge_project
from mla_cupy.reference.segments import prefill_segments
from mla_cupy.reference.sparse import sparse_mla_backward, sparse_mla_forward
from mla_cupy.reference.sparse_decode import sparse_mla_decode

__all__ = [
    "MlaConfig",
    "MlaWeights",
    "SparseLoss",
    "WarmupLoss",
    "absorb",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "cache_slots",
    "cache_update",
    "cascade_decode",
    "indexer_cache_append",
    "indexer_cache_gather",
    "indexer_head_sums",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_prepare",
    "indexer_prepare_k",
    "indexer_prepare_q",
    "indexer_select",
    "indexer_select_paged",
    "indexer_sparse_loss",
    "indexer_topk",
    "indexer_warmup_loss",
    "merge_project",
    "merge_states",
    "mla_decode",
    "mla_layer",
    "mla_prefill",
    "mla_prefill_backward",
    "mla_prepare",
    "prefill_mask",
    "prefill_segments",
    "random_weights",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]
# ---- End of the generated part


def __dir__() -> list[str]:
    return __all__
