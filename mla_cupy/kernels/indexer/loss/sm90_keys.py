"""Host side of `indexer/loss/sm90_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    FINITE_KEYS,
    INDEX_PIECES,
    TILE_KEYS,
    IndexVariant,
    finite_key_map,
    index_variant,
    key_splits,
    query_map,
    unsupported,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

BLOCK_HEADS = 64


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys and split of the tokens that see it."""
    return -(-problem.s_kv // TILE_KEYS) * key_splits(problem), 1, 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries, a token's heads at a time, and the copy of the keys."""
    return ("index_q", query_map(call.view("index_q"), (1, BLOCK_HEADS))), (FINITE_KEYS, finite_key_map(call))


KERNEL = LossKernel(
    "indexer_loss_sm90_keys",
    "gradient by index keys with WGMMA and TMA: sums over splits of the tokens",
    "indexer/loss/sm90_keys.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(IndexVariant, INDEX_PIECES)),
    facts={"block_keys": TILE_KEYS},
    unsupported=unsupported,
    grid=grid,
    variant=index_variant,
    maps=maps,
)
