"""Host side of `indexer/loss/generic_scatter.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import MAX_INDEX_DIM, LossKernel, LossProblem, in_turns
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_KEYS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per token and place of its list."""
    return -(-problem.keys // BLOCK_KEYS), in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_generic_scatter",
    "gradient by the index keys of lists on any GPU, in fp32",
    "indexer/loss/generic_scatter.cu",
    LossParams,
    facts={"block_keys": BLOCK_KEYS, "max_index_dim": MAX_INDEX_DIM},
    grid=grid,
)
