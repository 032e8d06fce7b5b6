"""Host side of `indexer/loss/finite_values.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS, LossKernel, LossProblem
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per tile of keys."""
    return -(-problem.s_kv // TILE_KEYS), 1, 1


KERNEL = LossKernel(
    "indexer_loss_finite_values",
    "a copy of the attention's values without what is not finite",
    "indexer/loss/finite_values.cu",
    LossParams,
    facts={"block_keys": TILE_KEYS},
    grid=grid,
)
