"""The lightning indexer: preparation of queries and keys, their cache, logits, top-k, its losses."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer import logits, loss, prepare, select, topk
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
]

KERNELS: tuple[KernelSpec[Any], ...] = (
    *logits.KERNELS,
    *loss.KERNELS,
    *prepare.KERNELS,
    *select.KERNELS,
    *topk.KERNELS,
)
