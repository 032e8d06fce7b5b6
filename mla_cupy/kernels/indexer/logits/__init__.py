"""Logits of the indexer: of contiguous and of paged keys."""

from typing import Any

from mla_cupy.kernels.indexer.logits import schedule
from mla_cupy.kernels.indexer.logits.pipeline import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.spec import KernelSpec

__all__ = ["KERNELS", "LOGITS", "LOGITS_PAGED"]

KERNELS: tuple[KernelSpec[Any], ...] = (*dict.fromkeys((*LOGITS.kernels, *LOGITS_PAGED.kernels)), schedule.KERNEL)
