"""The lightning indexer: preparation of queries and keys, their cache, logits, top-k, its losses."""

from typing import Any

from mla_cupy.kernels.indexer import logits, loss, prepare, topk
from mla_cupy.kernels.spec import KernelSpec

__all__ = ["KERNELS"]

KERNELS: tuple[KernelSpec[Any], ...] = (*logits.KERNELS, *prepare.KERNELS, *topk.KERNELS, *loss.KERNELS)
