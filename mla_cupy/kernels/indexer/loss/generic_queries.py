"""Host side of `indexer/loss/generic_queries.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import MAX_INDEX_DIM, LossKernel, LossProblem, in_turns
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_HEADS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per token and head."""
    return -(-problem.index_heads // BLOCK_HEADS), in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_generic_queries",
    "gradients by index queries and weights on any GPU, in fp32",
    "indexer/loss/generic_queries.cu",
    LossParams,
    facts={"block_heads": BLOCK_HEADS, "max_index_dim": MAX_INDEX_DIM},
    grid=grid,
)
