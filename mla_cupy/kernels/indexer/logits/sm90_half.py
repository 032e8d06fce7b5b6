"""Host side of `indexer/logits/sm90.cu` with products and sums in float16."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.indexer.logits import sm90
from mla_cupy.kernels.indexer.logits.problem import CODES, HEAD_DIMS, LogitsProblem
from mla_cupy.kernels.indexer.logits.sm90 import HALF_TILE_KEYS
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if problem.accumulate != "float16":
        return Reason('is for accumulate="float16"')
    return sm90.unsupported(problem, device)


def variant(problem: LogitsProblem) -> Variant:
    """The build that it takes."""
    return Variant(dtype=problem.dtype, head_dim=problem.head_dim, accumulator="float16")


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys."""
    return ("q", sm90.q_map(call.view("q"))), ("k", sm90.k_map(call.view("k"), HALF_TILE_KEYS))


KERNEL = replace(
    sm90.KERNEL,
    name="indexer_logits_sm90_half",
    about="the same with products in float16: faster, for queries of small codes",
    variants=variants(dtype=CODES[:1], head_dim=HEAD_DIMS, accumulator=("float16",)),
    unsupported=unsupported,
    variant=variant,
    tile_keys=HALF_TILE_KEYS,
    maps=maps,
)
