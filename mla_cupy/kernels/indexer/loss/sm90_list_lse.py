"""Host side of `indexer/loss/sm90_list_lse.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel
from mla_cupy.kernels.indexer.loss.sm90 import FEW_PIECES, MANY_PIECES, query_map
from mla_cupy.kernels.indexer.loss.sm90_list_scores import MAX_HEADS, grid, unsupported
from mla_cupy.kernels.indexer.loss.sm90_lse import LseVariant, variant
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.tensormap import TensorMapSpec


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """All heads of a token."""
    return (("q", query_map(call.view("q"), (1, MAX_HEADS))),)


KERNEL = LossKernel(
    "indexer_loss_sm90_list_lse",
    "log-sum-exps of the attention for the indexer's sparse loss with WGMMA, keys gathered",
    "indexer/loss/sm90_list_lse.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(LseVariant, (MANY_PIECES, FEW_PIECES))),
    facts={"block_heads": MAX_HEADS},
    unsupported=unsupported,
    grid=grid,
    variant=variant,
    maps=maps,
)
