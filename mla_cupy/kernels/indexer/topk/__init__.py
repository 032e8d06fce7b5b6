"""The exact selection of the largest logits."""

from mla_cupy.kernels.indexer.topk.pipeline import TOPK

__all__ = ["KERNELS", "TOPK"]

KERNELS = TOPK.kernels
