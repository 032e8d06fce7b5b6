"""The public operations: their meaning, their checks, how they run."""

import inspect

from mla_cupy.arrays import breaks_graphs

# ---- Written by `python -m tools.generate`: operations and public names
from mla_cupy.ops import (
    cache,
    cache_pages,
    cascade,
    decode,
    masks,
    merge,
    prefill,
    prefill_backward,
    preparation,
    projection,
    segments,
    sparse_backward,
    sparse_decode,
    sparse_forward,
)
from mla_cupy.ops.cache import cache_append, cache_gather
from mla_cupy.ops.cache_pages import cache_copy_pages, cache_slots, cache_update
from mla_cupy.ops.call import workspace_bytes
from mla_cupy.ops.cascade import cascade_decode
from mla_cupy.ops.cascade_plan import CascadePlan, plan_cascade
from mla_cupy.ops.choices import KernelChoice, which
from mla_cupy.ops.composite import Composite
from mla_cupy.ops.decode import mla_decode
from mla_cupy.ops.decode_plan import DecodePlan, plan_decode
from mla_cupy.ops.groups import Fp8, LossResults, OutRope, Packed, Project, Shard
from mla_cupy.ops.indexer import (
    head_sums,
    key_cache,
    logits,
    logits_paged,
    prepare,
    prepare_both,
    select,
    select_paged,
    sparse_loss,
    topk,
    warmup_loss,
)
from mla_cupy.ops.indexer.head_sums import indexer_head_sums
from mla_cupy.ops.indexer.key_cache import indexer_cache_append, indexer_cache_gather
from mla_cupy.ops.indexer.logits import indexer_logits
from mla_cupy.ops.indexer.logits_paged import indexer_logits_paged
from mla_cupy.ops.indexer.loss_inputs import SparseLoss, WarmupLoss
from mla_cupy.ops.indexer.prepare import indexer_prepare_k, indexer_prepare_q
from mla_cupy.ops.indexer.prepare_both import indexer_prepare
from mla_cupy.ops.indexer.select import indexer_select
from mla_cupy.ops.indexer.select_paged import indexer_select_paged
from mla_cupy.ops.indexer.sparse_loss import indexer_sparse_loss
from mla_cupy.ops.indexer.topk import indexer_topk
from mla_cupy.ops.indexer.warmup_loss import indexer_warmup_loss
from mla_cupy.ops.masks import prefill_mask
from mla_cupy.ops.merge import merge_states
from mla_cupy.ops.operation import Operation
from mla_cupy.ops.prefill import mla_prefill
from mla_cupy.ops.prefill_backward import mla_prefill_backward
from mla_cupy.ops.prefix_groups import PrefixGroup, shared_prefixes
from mla_cupy.ops.preparation import mla_prepare
from mla_cupy.ops.projection import absorb, merge_project
from mla_cupy.ops.segments import prefill_segments
from mla_cupy.ops.sparse_backward import sparse_mla_backward
from mla_cupy.ops.sparse_decode import sparse_mla_decode
from mla_cupy.ops.sparse_forward import sparse_mla_forward
from mla_cupy.ops.value_checks import checking

__all__ = [
    "BOUND_OPERATIONS",
    "COMPOSITE_OPERATIONS",
    "OPERATIONS",
    "POOL_OPERATIONS",
    "CascadePlan",
    "DecodePlan",
    "Fp8",
    "KernelChoice",
    "LossResults",
    "OutRope",
    "Packed",
    "PrefixGroup",
    "Project",
    "Shard",
    "SparseLoss",
    "WarmupLoss",
    "absorb",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "cache_slots",
    "cache_update",
    "cascade_decode",
    "checking",
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
    "mla_prefill",
    "mla_prefill_backward",
    "mla_prepare",
    "plan_cascade",
    "plan_decode",
    "prefill_mask",
    "prefill_segments",
    "shared_prefixes",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
    "which",
    "workspace_bytes",
]

_DESCRIBED: tuple[Operation, ...] = (
    cache.APPEND_OPERATION,
    cache.GATHER_OPERATION,
    cache_pages.COPY_PAGES_OPERATION,
    cache_pages.UPDATE_OPERATION,
    cache_pages.SLOTS_OPERATION,
    cascade.OPERATION,
    decode.OPERATION,
    masks.OPERATION,
    merge.OPERATION,
    prefill.OPERATION,
    prefill_backward.OPERATION,
    preparation.OPERATION,
    projection.ABSORB_OPERATION,
    projection.MERGE_OPERATION,
    segments.OPERATION,
    sparse_backward.OPERATION,
    sparse_decode.OPERATION,
    sparse_forward.OPERATION,
    head_sums.OPERATION,
    key_cache.APPEND_OPERATION,
    key_cache.GATHER_OPERATION,
    logits.OPERATION,
    logits_paged.OPERATION,
    prepare.OPERATION_Q,
    prepare.OPERATION_K,
    prepare_both.OPERATION,
    select.OPERATION,
    select_paged.OPERATION,
    sparse_loss.OPERATION,
    topk.OPERATION,
    warmup_loss.OPERATION,
)
# ---- End of the generated part

_COMPOSITES = tuple(one for one in _DESCRIBED if isinstance(one, Composite))
_SINGLE = tuple(one for one in _DESCRIBED if one not in _COMPOSITES)

#: The operations on arrays alone, by the names of their public functions.
OPERATIONS: dict[str, Operation] = {one.name: one for one in _SINGLE if not one.on_pages}
#: The operations on paged caches of records.
POOL_OPERATIONS: dict[str, Operation] = {one.name: one for one in _SINGLE if one.on_pages}
#: Those that run others.
COMPOSITE_OPERATIONS: dict[str, Operation] = {one.name: one for one in _COMPOSITES}
#: Those that compiled programs can call: all but composites, and what `PagedKVCache` does between steps.
BOUND_OPERATIONS: dict[str, Operation] = {one.name: one for one in _DESCRIBED if one.bound}

for _name in __all__:
    if inspect.isfunction(_function := globals()[_name]):
        breaks_graphs(_function)
