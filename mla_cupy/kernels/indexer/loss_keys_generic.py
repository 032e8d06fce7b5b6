"""Host side of `indexer/loss_keys_generic.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss_problem import MAX_INDEX_DIM, PARAMS, LossKernel, LossProblem
from mla_cupy.runtime.driver import Dim3

BLOCK_KEYS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per key."""
    return -(-problem.s_kv // BLOCK_KEYS), 1, 1


KERNEL = LossKernel(
    "indexer_loss_keys_generic",
    "gradient by index keys on any GPU, in fp32",
    "indexer/loss_keys_generic.cu",
    PARAMS,
    facts={"block_keys": BLOCK_KEYS, "max_index_dim": MAX_INDEX_DIM},
    grid=grid,
)
