"""Host side of `indexer/loss/ranges.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_TOKENS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per token."""
    return -(-tokens // BLOCK_TOKENS), 1, 1


KERNEL = LossKernel(
    "indexer_loss_ranges",
    "the keys that each token of the indexer's loss sees",
    "indexer/loss/ranges.cu",
    LossParams,
    facts={"block_tokens": BLOCK_TOKENS},
    grid=grid,
)
