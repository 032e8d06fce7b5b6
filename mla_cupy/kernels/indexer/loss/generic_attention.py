"""Host side of `indexer/loss/generic_attention.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import MAX_HEAD_DIM, MAX_VALUE_DIM, LossKernel, LossProblem, in_turns
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_HEADS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per token and head."""
    return -(-problem.heads // BLOCK_HEADS), in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_generic_attention",
    "attention beside the indexer's loss on any GPU, in fp32",
    "indexer/loss/generic_attention.cu",
    LossParams,
    facts={"block_heads": BLOCK_HEADS, "max_head_dim": MAX_HEAD_DIM, "max_value_dim": MAX_VALUE_DIM},
    grid=grid,
)
