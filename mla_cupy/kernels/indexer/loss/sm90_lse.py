"""Host side of `indexer/loss/sm90_lse.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import FEW_PIECES, MANY_PIECES, key_map, pieces, query_map, unsupported
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Variant
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_TOKENS = 128


@dataclass(frozen=True)
class LseVariant(Variant):
    """Pieces of a row of queries and keys."""

    pieces: int


def variant(problem: LossProblem) -> LseVariant:
    """The build that it takes."""
    return LseVariant(FEW_PIECES if pieces(problem.head_dim) <= FEW_PIECES else MANY_PIECES)


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per head and tile of tokens."""
    return problem.heads, -(-tokens // TILE_TOKENS), 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys of the attention."""
    return ("q", query_map(call.view("q"), (TILE_TOKENS, 1))), ("k", key_map(call.view("k")))


KERNEL = LossKernel(
    "indexer_loss_sm90_lse",
    "log-sum-exps of the attention for the indexer's loss with WGMMA and TMA",
    "indexer/loss/sm90_lse.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(LseVariant, (MANY_PIECES, FEW_PIECES))),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
