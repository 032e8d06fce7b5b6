"""Host side of `indexer/loss/sm90_head_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import (
    HEAD_TILE_TOKENS,
    INDEX_PIECES,
    TILE_KEYS,
    IndexVariant,
    head_gradient_maps,
    index_variant,
    key_splits,
    unsupported_per_head,
)
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys and split of the heads of the tokens that see it."""
    return -(-problem.s_kv // TILE_KEYS) * key_splits(problem), 1, 1


KERNEL = LossKernel(
    "indexer_loss_sm90_head_keys",
    "gradient per head by index keys with WGMMA and TMA: sums over splits of the tokens' heads",
    "indexer/loss/sm90_head_keys.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(IndexVariant, INDEX_PIECES)),
    facts={"block_keys": TILE_KEYS, "tile_tokens": HEAD_TILE_TOKENS},
    unsupported=unsupported_per_head,
    grid=grid,
    variant=index_variant,
    maps=head_gradient_maps,
)
