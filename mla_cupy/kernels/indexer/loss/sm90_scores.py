"""Host side of `indexer/loss/sm90_scores.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    FEW_PIECES,
    INDEX_PIECES,
    MANY_PIECES,
    TILE_KEYS,
    ScoresVariant,
    key_map,
    pieces,
    query_map,
    unsupported,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_TOKENS = 128


def variant(problem: LossProblem) -> ScoresVariant:
    """The build that it takes."""
    few = pieces(problem.head_dim) <= FEW_PIECES
    return ScoresVariant(max(1, pieces(problem.index_dim)), FEW_PIECES if few else MANY_PIECES)


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys and tokens."""
    return -(-problem.s_kv // TILE_KEYS), -(-tokens // TILE_TOKENS), 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys of the attention, then of the indexer: where there are none, of the attention again."""
    box = (TILE_TOKENS, 1)
    index_q, index_k = ("index_q", "index_k") if call.name("index_q") else ("q", "k")
    return (
        ("q", query_map(call.view("q"), box)),
        ("k", key_map(call.view("k"))),
        (index_q, query_map(call.view(index_q), box)),
        (index_k, key_map(call.view(index_k))),
    )


KERNEL = LossKernel(
    "indexer_loss_sm90_scores",
    "targets and scores of the indexer's loss with WGMMA and TMA",
    "indexer/loss/sm90_scores.cu",
    LossParams,
    HOPPER,
    variants=tuple(ScoresVariant(index, main) for main in (MANY_PIECES, FEW_PIECES) for index in INDEX_PIECES),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
