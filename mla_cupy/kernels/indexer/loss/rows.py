"""Host side of `indexer/loss/rows.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import TILE_KEYS, LossKernel, LossProblem, in_turns
from mla_cupy.kernels.params import LossParams
from mla_cupy.runtime.driver import Dim3


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per row."""
    return problem.rows_per_token, in_turns(tokens), 1


KERNEL = LossKernel(
    "indexer_loss_rows",
    "divergence of each row, and the gradient by its scores",
    "indexer/loss/rows.cu",
    LossParams,
    facts={"padded_keys": TILE_KEYS},
    grid=grid,
)
