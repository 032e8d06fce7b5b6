"""Host side of `indexer/loss_list_lse_sm90.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss_list_scores_sm90 import MAX_HEADS, grid, unsupported
from mla_cupy.kernels.indexer.loss_lse_sm90 import LseVariant, variant
from mla_cupy.kernels.indexer.loss_problem import PARAMS, LossKernel
from mla_cupy.kernels.indexer.loss_sm90 import FEW_PIECES, MANY_PIECES, query_map
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.tensormap import TensorMapSpec


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """All heads of a token."""
    return (("q", query_map(call.view("q"), (1, MAX_HEADS))),)


KERNEL = LossKernel(
    "indexer_loss_list_lse_sm90",
    "log-sum-exps of the attention for the indexer's sparse loss with WGMMA, keys gathered",
    "indexer/loss_list_lse_sm90.cu",
    PARAMS,
    HOPPER,
    variants=tuple(map(LseVariant, (MANY_PIECES, FEW_PIECES))),
    facts={"block_heads": MAX_HEADS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
