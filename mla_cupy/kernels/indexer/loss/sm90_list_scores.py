"""Host side of `indexer/loss/sm90_list_scores.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    FEW_PIECES,
    INDEX_PIECES,
    MANY_PIECES,
    ScoresVariant,
    needs_hopper,
    pieces,
    query_map,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

MAX_HEADS = 128
_CHUNK_ELEMS = 8


def unsupported(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why it cannot take the problem; None if it can."""
    if (reason := needs_hopper(problem, device)) is not None:
        return reason
    if problem.topk is None:
        return Reason("takes lists of keys")
    if max(problem.heads, problem.index_heads) > MAX_HEADS:
        return Reason(f"takes h and h_i up to {MAX_HEADS}")
    return Reason("takes d in multiples of 8") if problem.head_dim % _CHUNK_ELEMS else None


def variant(problem: LossProblem) -> ScoresVariant:
    """The build that it takes."""
    few = pieces(problem.head_dim) <= FEW_PIECES
    return ScoresVariant(max(1, pieces(problem.index_dim)), FEW_PIECES if few else MANY_PIECES)


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per token."""
    return tokens, 1, 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """All heads of a token, of both kinds; where there are no index heads, of the attention again."""
    names = ("q", "index_q" if call.name("index_q") else "q")
    return tuple((name, query_map(call.view(name), (1, MAX_HEADS))) for name in names)


KERNEL = LossKernel(
    "indexer_loss_sm90_list_scores",
    "targets and scores of the indexer's sparse loss with WGMMA, keys gathered",
    "indexer/loss/sm90_list_scores.cu",
    LossParams,
    HOPPER,
    variants=tuple(ScoresVariant(index, main) for main in (MANY_PIECES, FEW_PIECES) for index in INDEX_PIECES),
    facts={"block_heads": MAX_HEADS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
