"""The operations that can be benchmarked: one line each."""

from __future__ import annotations

from .core.operation import BenchOperation

# ---- Written by `python -m tools.generate`: benchmarks
from .ops.absorption import ABSORPTION
from .ops.cache import CACHE
from .ops.cascade import CASCADE
from .ops.decode import DECODE
from .ops.dense_decode_fp8 import DENSE_DECODE_FP8
from .ops.indexer_logits import INDEXER_LOGITS
from .ops.indexer_loss import INDEXER_LOSS
from .ops.indexer_prepare import INDEXER_PREPARE
from .ops.indexer_topk import INDEXER_TOPK
from .ops.layer import LAYER
from .ops.prefill import PREFILL
from .ops.prefill_backward import PREFILL_BACKWARD
from .ops.prepare import PREPARE
from .ops.projection import PROJECTION
from .ops.sparse_backward import SPARSE_BACKWARD
from .ops.sparse_decode import SPARSE_DECODE
from .ops.sparse_forward import SPARSE_FORWARD
from .ops.sparse_forward_fp8 import SPARSE_FORWARD_FP8

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
# ---- End of the generated part

OPERATIONS: dict[str, BenchOperation] = {operation.name: operation for operation in _KNOWN}
