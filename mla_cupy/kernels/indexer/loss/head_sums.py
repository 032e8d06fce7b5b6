"""Host side of `indexer/loss/head_sums.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem, in_turns
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_KEYS = 256


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A thread per key."""
    return -(-problem.keys // BLOCK_KEYS), in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_head_sums",
    "targets of the indexer's losses, for others to add to",
    "indexer/loss/head_sums.cu",
    LossParams,
    facts={"block_keys": BLOCK_KEYS},
    grid=grid,
)
