"""Host side of `indexer/loss/sm90_queries.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    FINITE_KEYS,
    INDEX_PIECES,
    IndexVariant,
    finite_key_map,
    index_variant,
    query_map,
    unsupported,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

BLOCK_TOKENS, BLOCK_HEADS = 2, 64
MAX_BLOCKS = 528
"""Of a group of heads: beyond them a block takes several pairs, and loads for the next while it stores the last."""


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """Blocks that divide the pairs of tokens, per group of heads."""
    return min(-(-tokens // BLOCK_TOKENS), MAX_BLOCKS), -(-problem.index_heads // BLOCK_HEADS), 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries, a token's heads at a time, and the copy of the keys."""
    return ("index_q", query_map(call.view("index_q"), (1, BLOCK_HEADS))), (FINITE_KEYS, finite_key_map(call))


KERNEL = LossKernel(
    "indexer_loss_sm90_queries",
    "gradients by index queries and weights with WGMMA and TMA",
    "indexer/loss/sm90_queries.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(IndexVariant, INDEX_PIECES)),
    facts={"block_tokens": BLOCK_TOKENS, "block_heads": BLOCK_HEADS},
    unsupported=unsupported,
    grid=grid,
    variant=index_variant,
    maps=maps,
)
