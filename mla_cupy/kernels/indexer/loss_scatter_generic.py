"""Host side of `indexer/loss_scatter_generic.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss_problem import MAX_INDEX_DIM, PARAMS, LossKernel, LossProblem, in_turns
from mla_cupy.runtime.driver import Dim3

BLOCK_KEYS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per token and place of its list."""
    return -(-problem.keys // BLOCK_KEYS), in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_scatter_generic",
    "gradient by the index keys of lists on any GPU, in fp32",
    "indexer/loss_scatter_generic.cu",
    PARAMS,
    facts={"block_keys": BLOCK_KEYS, "max_index_dim": MAX_INDEX_DIM},
    grid=grid,
)
