"""Logits of the indexer: of contiguous and of paged keys."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.logits import generic, mma, schedule, sm90, sm90_paged, sm100
from mla_cupy.kernels.indexer.logits.pipeline import LOGITS, LOGITS_PAGED
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "LOGITS",
    "LOGITS_PAGED",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    generic.KERNEL,
    mma.KERNEL,
    schedule.KERNEL,
    sm100.KERNEL,
    sm90.KERNEL,
    sm90_paged.KERNEL,
)
