"""Host side of `indexer/loss/finite_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3

BLOCK_ELEMS = 256
_MAX_BLOCKS = 1 << 20


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A thread per element, in turns."""
    return min(-(-problem.s_kv * problem.index_dim // BLOCK_ELEMS), _MAX_BLOCKS), 1, 1


KERNEL = LossKernel(
    "indexer_loss_finite_keys",
    "a copy of the index keys without what is not finite",
    "indexer/loss/finite_keys.cu",
    LossParams,
    facts={"block_elems": BLOCK_ELEMS},
    grid=grid,
)
