"""Host side of `indexer/logits/sm90.cu`, with products and sums in float32 or in float16."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.kernels.indexer.logits.problem import (
    BLOCK_TOKENS,
    CODES,
    DTYPES,
    HEAD_DIMS,
    MAX_HEADS,
    LogitsKernel,
    LogitsProblem,
)
from mla_cupy.kernels.params import LogitsParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_KEYS = 128
_SHORT_LINE = 128
TILE_HEADS = 8
"""Heads of an m64 tile of queries."""
PIECE_BYTES = 128
"""Width of a TMA copy: the span of the swizzle. Beyond a shorter row it writes zeros."""
_WIDE_MAX_HEADS = 64
"""Most heads if rows have two pieces: the queries of more do not fit next to the keys."""


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.page_size:
        return Reason("takes contiguous keys")
    heads = max_heads(problem)
    if problem.heads > heads:
        return Reason(f"takes at most {heads} heads of {problem.head_dim} {problem.dtype}")
    return problem.countable(TILE_KEYS) if problem.aligned else needs_alignment("q and k")


def variant(problem: LogitsProblem) -> Variant:
    """The build for a problem."""
    accumulator = "float16" if problem.accumulate == "float16" else "float"
    return Variant(dtype=problem.dtype, head_dim=problem.head_dim, accumulator=accumulator)


def tile_keys(accumulator: str) -> int:
    """Keys of a tile: twice the number where sums take half the registers."""
    return 2 * TILE_KEYS if accumulator == "float16" else TILE_KEYS


def max_heads(of: LogitsProblem | Variant) -> int:
    """Most heads with a block of tokens' queries in shared memory."""
    return MAX_HEADS if TABLE[of.dtype].nbytes * of.head_dim <= PIECE_BYTES else _WIDE_MAX_HEADS


def q_map(q: View) -> TensorMapSpec:
    """The queries as (heads, tokens, head_dim), fetched as m64 tiles: row 8 * head + token."""
    (tokens, heads, head_dim), nbytes = q.shape, TABLE[q.dtype].nbytes
    token, head = (nbytes * stride for stride in q.strides[:2])
    row = nbytes * head_dim
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(head_dim, tokens, heads),
        strides_bytes=(token if tokens > 1 else row, head if heads > 1 else row),
        box=(PIECE_BYTES // nbytes, BLOCK_TOKENS, TILE_HEADS),
    )


def k_map(k: View, tile_keys: int = TILE_KEYS) -> TensorMapSpec:
    """The keys as (1, keys, head_dim), fetched in tiles."""
    (keys, head_dim), nbytes = k.shape, TABLE[k.dtype].nbytes
    stride = nbytes * (k.strides[0] if keys > 1 else head_dim)
    return TensorMapSpec(
        k.dtype,
        k.ptr,
        dims=(head_dim, keys, 1),
        strides_bytes=(stride, stride),
        box=(PIECE_BYTES // nbytes, tile_keys, 1),
    )


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries and keys."""
    return ("q", q_map(call.view("q"))), ("k", k_map(call.view("k"), tile_keys(call.options.accumulate)))


KERNEL = LogitsKernel(
    "indexer_logits_sm90",
    "indexer logits with WGMMA and TMA, products in float32, or for queries with small codes in float16",
    "indexer/logits/sm90.cu",
    LogitsParams,
    HOPPER,
    (
        *variants(dtype=DTYPES, head_dim=HEAD_DIMS, accumulator=("float",)),
        *variants(dtype=CODES[:1], head_dim=HEAD_DIMS, accumulator=("float16",)),
    ),
    facts={"block_tokens": BLOCK_TOKENS, "max_short_line": _SHORT_LINE},
    facts_of=lambda variant: {"max_heads": max_heads(variant), "tile_keys": tile_keys(variant.accumulator)},
    unsupported=unsupported,
    variant=variant,
    tile_keys=lambda problem: tile_keys(problem.accumulate),
    short_line=_SHORT_LINE,
    maps=maps,
)
