"""The exact selection of the largest logits."""
# Written by `python -m tools.generate`, but for the line above.

from typing import Any

from mla_cupy.kernels.indexer.topk import select
from mla_cupy.kernels.indexer.topk.pipeline import TOPK
from mla_cupy.kernels.spec import KernelSpec

__all__ = [
    "KERNELS",
    "TOPK",
]

KERNELS: tuple[KernelSpec[Any], ...] = (select.KERNEL,)
