"""The operations that can be benchmarked: one line each."""

from __future__ import annotations

from .core.operation import BenchOperation

# ---- Written by `python -m tools.generate`: benchmarks
from .ops.absorption.operation import ABSORPTION
from .ops.cache.operation import CACHE
from .ops.cascade.operation import CASCADE
from .ops.decode.operation import DECODE
from .ops.dense_decode_fp8.operation import DENSE_DECODE_FP8
from .ops.indexer_logits.operation import INDEXER_LOGITS
from .ops.indexer_loss.operation import INDEXER_LOSS
from .ops.indexer_prepare.operation import INDEXER_PREPARE
from .ops.indexer_topk.operation import INDEXER_TOPK
from .ops.layer.operation import LAYER
from .ops.prefill.operation import PREFILL
from .ops.prefill_backward.operation import PREFILL_BACKWARD
from .ops.prepare.operation import PREPARE
from .ops.projection.operation import PROJECTION
from .ops.sparse_backward.operation import SPARSE_BACKWARD
from .ops.sparse_decode.operation import SPARSE_DECODE
from .ops.sparse_forward.operation import SPARSE_FORWARD
from .ops.sparse_forward_fp8.operation import SPARSE_FORWARD_FP8

_KNOWN = (
    ABSORPTION,
    CACHE,
    CASCADE,
    DECODE,
    DENSE_DECODE_FP8,
    INDEXER_LOGITS,
    INDEXER_LOSS,
    INDEXER_PREPARE,
    INDEXER_TOPK,
    LAYER,
    PREFILL,
    PREFILL_BACKWARD,
    PREPARE,
    PROJECTION,
    SPARSE_BACKWARD,
    SPARSE_DECODE,
    SPARSE_FORWARD,
    SPARSE_FORWARD_FP8,
)
# ---- End of what is written

OPERATIONS: dict[str, BenchOperation] = {operation.name: operation for operation in _KNOWN}
