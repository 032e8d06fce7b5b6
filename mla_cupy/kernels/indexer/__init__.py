"""The lightning indexer: preparation of queries and keys, their cache, logits, top-k."""

from typing import Any

from mla_cupy.kernels.indexer import logits_schedule
from mla_cupy.kernels.indexer.logits_pipeline import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.indexer.prepare_pipeline import APPEND_KEYS, GATHER_KEYS, PREPARE_K, PREPARE_Q
from mla_cupy.kernels.indexer.topk_pipeline import TOPK
from mla_cupy.kernels.spec import Kernel

__all__ = ["APPEND_KEYS", "GATHER_KEYS", "KERNELS", "LOGITS", "LOGITS_PAGED", "PREPARE_K", "PREPARE_Q", "TOPK"]

KERNELS: tuple[Kernel[Any], ...] = (
    *dict.fromkeys((*LOGITS.kernels, *LOGITS_PAGED.kernels)),
    logits_schedule.KERNEL,
    *PREPARE_Q.kernels,
    *GATHER_KEYS.kernels,
    *TOPK.kernels,
)
