"""Host side of `indexer/loss/generic_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import MAX_INDEX_DIM, LossKernel, LossProblem
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_KEYS = 4


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A warp per key."""
    return -(-problem.s_kv // BLOCK_KEYS), 1, 1


KERNEL = LossKernel(
    "indexer_loss_generic_keys",
    "gradient by index keys on any GPU, in fp32",
    "indexer/loss/generic_keys.cu",
    LossParams,
    facts={"block_keys": BLOCK_KEYS, "max_index_dim": MAX_INDEX_DIM},
    grid=grid,
)
