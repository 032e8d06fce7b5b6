"""Host side of `indexer/logits/sm90_paged.cu`."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.indexer.logits.problem import (
    BLOCK_TOKENS,
    CODES,
    MAX_HEADS,
    LogitsKernel,
    LogitsProblem,
)
from mla_cupy.kernels.params import LogitsParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

PAGE_KEYS = 64
HEAD_DIM = 128
BLOCK_HEADS = (32, 64, 128)
_SHORT_LINE = 1024
_QUERY_STAGES = 2
_SCALE_BYTES = 4 * PAGE_KEYS
_E2M1_HEADS = 64
"""Heads of the builds for keys in e2m1."""

_VARIANTS = (
    Variant(block_heads=32, query_tiles=_QUERY_STAGES * 2),
    Variant(block_heads=32, query_tiles=_QUERY_STAGES * BLOCK_TOKENS),
    Variant(block_heads=64, query_tiles=_QUERY_STAGES * 2),
    Variant(block_heads=64, query_tiles=_QUERY_STAGES * BLOCK_TOKENS),
    Variant(block_heads=128, query_tiles=_QUERY_STAGES),
    Variant(block_heads=128, query_tiles=BLOCK_TOKENS),
)
"""Builds for the tokens that are multiplied at once, one per number of heads: weights may stay in registers."""
_E2M1_VARIANTS = (
    Variant(block_heads=_E2M1_HEADS, query_tiles=_QUERY_STAGES * 2, e2m1=1),
    Variant(block_heads=_E2M1_HEADS, query_tiles=_QUERY_STAGES * BLOCK_TOKENS, e2m1=1),
)
"""Builds for keys in e2m1, of few tokens and of many."""


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.dtype != CODES[0] or problem.head_dim != HEAD_DIM:
        return Reason(f"takes keys of {HEAD_DIM} codes, not of {problem.head_dim} {problem.dtype}")
    if problem.page_size != PAGE_KEYS or problem.num_pages == 0:
        return Reason(f"takes pages of {PAGE_KEYS} keys, not {problem.num_pages} of {problem.page_size}")
    if problem.block_tokens > BLOCK_TOKENS:
        return Reason(f"takes at most {BLOCK_TOKENS} tokens of a sequence, not {problem.block_tokens}")
    most = _E2M1_HEADS if problem.e2m1 else MAX_HEADS
    if problem.heads > most:
        return Reason(f"takes at most {most} heads{' of keys in e2m1' * problem.e2m1}, not {problem.heads}")
    return problem.countable(PAGE_KEYS) if problem.aligned else needs_alignment("q")


def variant(problem: LogitsProblem) -> Variant:
    """The build for a problem."""
    block = block_heads(problem.heads)
    few, many = _E2M1_VARIANTS if problem.e2m1 else (build for build in _VARIANTS if build.block_heads == block)
    return few if _QUERY_STAGES * problem.block_tokens <= few.query_tiles else many


def block_heads(heads: int) -> int:
    """Number of heads that a token has in the kernel."""
    return next(block for block in BLOCK_HEADS if heads <= block)


def q_map(q: View, heads_at_once: int) -> TensorMapSpec:
    """The queries as (b, s_q, heads, head_dim), fetched token by token."""
    b, s_q, heads, head_dim = q.shape
    strides = (q.strides[2] if heads > 1 else head_dim, q.strides[1] if s_q > 1 else head_dim)
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(head_dim, heads, s_q, b),
        strides_bytes=(*strides, q.strides[0] if b > 1 else head_dim),
        box=(HEAD_DIM, heads_at_once, 1, 1),
    )


def cache_maps(cache: View) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The codes of whole pages; and pages as rows of 256 bytes, the last with the scales."""
    pages, key_bytes = cache.shape[0], cache.shape[-1] - _SCALE_BYTES // PAGE_KEYS
    own_bytes = PAGE_KEYS * key_bytes + _SCALE_BYTES
    page_bytes = cache.strides[0] if pages > 1 else own_bytes
    codes = TensorMapSpec(
        cache.dtype,
        cache.ptr,
        dims=(key_bytes, PAGE_KEYS, pages),
        strides_bytes=(key_bytes, page_bytes),
        box=(key_bytes, PAGE_KEYS, 1),
        swizzle=f"{key_bytes}B",
    )
    scales = TensorMapSpec(
        cache.dtype,
        cache.ptr,
        dims=(_SCALE_BYTES, own_bytes // _SCALE_BYTES, pages),
        strides_bytes=(_SCALE_BYTES, page_bytes),
        box=(_SCALE_BYTES, 1, 1),
        swizzle="none",
    )
    return codes, scales


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries, codes and scales."""
    q, cache = call.view("q"), call.view("cache")
    codes, scales = cache_maps(cache)
    heads = block_heads(q.shape[2]) if codes.box[0] == HEAD_DIM else _E2M1_HEADS
    return ("q", q_map(q, heads)), ("cache", codes), ("cache", scales)


KERNEL = LogitsKernel(
    "indexer_logits_sm90_paged",
    "indexer logits of cached keys with WGMMA and TMA, for up to 8 next tokens",
    "indexer/logits/sm90_paged.cu",
    LogitsParams,
    HOPPER,
    variants=_VARIANTS + _E2M1_VARIANTS,
    facts={"page_keys": PAGE_KEYS, "max_short_line": _SHORT_LINE},
    unsupported=unsupported,
    variant=variant,
    tile_keys=lambda problem: PAGE_KEYS,
    short_line=_SHORT_LINE,
    maps=maps,
)
