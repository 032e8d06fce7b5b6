"""Host side of `indexer/loss/sm90_head_queries.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    INDEX_PIECES,
    IndexVariant,
    head_gradient_maps,
    index_variant,
    unsupported_per_head,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3

TILE_TOKENS = 128


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per head and tile of tokens."""
    return problem.heads, -(-tokens // TILE_TOKENS), 1


KERNEL = LossKernel(
    "indexer_loss_sm90_head_queries",
    "gradients per head by index queries and weights with WGMMA and TMA",
    "indexer/loss/sm90_head_queries.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(IndexVariant, INDEX_PIECES)),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported_per_head,
    grid=grid,
    variant=index_variant,
    maps=head_gradient_maps,
)
