"""Host side of `indexer/loss/sm90_list_gradients.cu`."""

from __future__ import annotations

from mla_cupy.kernels.indexer.loss.problem import LossKernel, LossProblem
from mla_cupy.kernels.indexer.loss.sm90 import INDEX_PIECES, IndexVariant, index_variant, query_map
from mla_cupy.kernels.indexer.loss.sm90_list_scores import unsupported
from mla_cupy.kernels.params import LossParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER
from mla_cupy.runtime.driver import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec

BLOCK_HEADS = 64


def grid(problem: LossProblem, tokens: int) -> Dim3:
    """A block per token and group of heads."""
    return tokens, -(-problem.index_heads // BLOCK_HEADS), 1


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """A token's index queries, some heads at a time."""
    return (("index_q", query_map(call.view("index_q"), (1, BLOCK_HEADS))),)


KERNEL = LossKernel(
    "indexer_loss_sm90_list_gradients",
    "gradients of the indexer's sparse loss with WGMMA, keys gathered",
    "indexer/loss/sm90_list_gradients.cu",
    LossParams,
    HOPPER,
    variants=tuple(map(IndexVariant, INDEX_PIECES)),
    facts={"block_heads": BLOCK_HEADS},
    unsupported=unsupported,
    grid=grid,
    variant=index_variant,
    maps=maps,
)
