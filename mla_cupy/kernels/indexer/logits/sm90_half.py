"""Host side of `indexer/logits/sm90.cu` with products and sums in float16."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.indexer.logits import sm90
from mla_cupy.kernels.indexer.logits.problem import CODES, HEAD_DIMS, LogitsProblem
from mla_cupy.kernels.indexer.logits.sm90 import HALF_TILE_KEYS, LogitsVariant
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import Reason
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if problem.accumulate != "float16":
        return Reason('is for accumulate="float16"')
    return sm90.unsupported(problem, device)


def variant(problem: LogitsProblem) -> LogitsVariant:
    """The build that it takes."""
    return LogitsVariant(problem.dtype, problem.head_dim, "float16")


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys."""
    return ("q", sm90.q_map(call.view("q"))), ("k", sm90.k_map(call.view("k"), HALF_TILE_KEYS))


KERNEL = replace(
    sm90.KERNEL,
    name="indexer_logits_sm90_half",
    about="the same with products in float16: faster, for queries of small codes",
    variants=tuple(LogitsVariant(CODES[0], head_dim, "float16") for head_dim in HEAD_DIMS),
    unsupported=unsupported,
    variant=variant,
    tile_keys=HALF_TILE_KEYS,
    maps=maps,
)
