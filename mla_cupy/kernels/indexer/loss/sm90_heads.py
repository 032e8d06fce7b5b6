"""Host side of `indexer/loss/sm90_heads.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    INDEX_PIECES,
    IndexVariant,
    finite_value_map,
    key_map,
    pieces,
    query_map,
    takes_rows,
    unsupported_per_head,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_TOKENS = 128
MAX_VALUE_DIM = 128


@dataclass(frozen=True)
class HeadsVariant(IndexVariant):
    """Pieces of a row of index queries and keys, 0 for attention alone; and whether there is an output."""

    with_output: int


def unsupported(problem: LossProblem, device: DeviceInfo) -> Reason | None:
    """Why it cannot be the main kernel; None if it can."""
    return unsupported_per_head(problem, device) or _too_wide(problem)


def attends(problem: LossProblem, device: DeviceInfo) -> bool:
    """Whether it can make the attention's output for another main kernel."""
    return takes_rows(problem, device) is None and _too_wide(problem) is None


def _too_wide(problem: LossProblem) -> Reason | None:
    return Reason(f"takes d_v up to {MAX_VALUE_DIM}") if problem.value_dim > MAX_VALUE_DIM else None


def variant(problem: LossProblem) -> HeadsVariant:
    """The build that it takes."""
    return HeadsVariant(pieces(problem.index_dim) if problem.per_head else 0, int(problem.value_dim > 0))


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per head and tile of tokens."""
    return problem.heads, -(-tokens // TILE_TOKENS), 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys of the attention, then of the indexer, and values: where there are none, the keys again."""
    q_box, keys = (TILE_TOKENS, 1), ("k", key_map(call.view("k")))
    values = finite_value_map(call) if call.name("v") else keys
    return (
        ("q", query_map(call.view("q"), q_box)),
        keys,
        ("index_q", query_map(call.view("index_q"), q_box)),
        ("index_k", key_map(call.view("index_k"))),
        values,
    )


KERNEL = LossKernel(
    "indexer_loss_sm90_heads",
    "loss per head, and the attention's output, with WGMMA and TMA",
    "indexer/loss/sm90_heads.cu",
    LossParams,
    HOPPER,
    variants=(
        *(HeadsVariant(index, output) for index in INDEX_PIECES for output in (1, 0)),
        HeadsVariant(0, 1),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
