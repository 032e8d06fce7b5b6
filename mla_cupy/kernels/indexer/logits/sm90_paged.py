"""Host side of `indexer/logits/sm90_paged.cu`."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.indexer.logits.problem import (
    BLOCK_TOKENS,
    CODES,
    MAX_HEADS,
    NO_E2M1,
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
_PAGE_BYTES = PAGE_KEYS * HEAD_DIM + _SCALE_BYTES


_VARIANTS = (
    Variant(block_heads=32, query_tiles=_QUERY_STAGES * 2),
    Variant(block_heads=32, query_tiles=_QUERY_STAGES * BLOCK_TOKENS),
    Variant(block_heads=64, query_tiles=_QUERY_STAGES * 2),
    Variant(block_heads=64, query_tiles=_QUERY_STAGES * BLOCK_TOKENS),
    Variant(block_heads=128, query_tiles=_QUERY_STAGES),
    Variant(block_heads=128, query_tiles=BLOCK_TOKENS),
)
"""Builds for as many tokens as are multiplied at once, one per number of heads: weights may stay in registers."""


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.e2m1:
        return NO_E2M1
    if problem.dtype != CODES[0] or problem.head_dim != HEAD_DIM:
        return Reason(f"takes keys of {HEAD_DIM} codes, not of {problem.head_dim} {problem.dtype}")
    if problem.page_size != PAGE_KEYS or problem.num_pages == 0:
        return Reason(f"takes pages of {PAGE_KEYS} keys, not {problem.num_pages} of {problem.page_size}")
    if problem.block_tokens > BLOCK_TOKENS:
        return Reason(f"takes at most {BLOCK_TOKENS} tokens of a sequence, not {problem.block_tokens}")
    if problem.heads > MAX_HEADS:
        return Reason(f"takes at most {MAX_HEADS} heads, not {problem.heads}")
    return problem.countable(PAGE_KEYS) if problem.aligned else needs_alignment("q")


def variant(problem: LogitsProblem) -> Variant:
    """The build that a problem takes."""
    block = block_heads(problem.heads)
    few, many = (build for build in _VARIANTS if build.block_heads == block)
    return few if _QUERY_STAGES * problem.block_tokens <= few.query_tiles else many


def block_heads(heads: int) -> int:
    """Number of heads that a token has in the kernel."""
    return next(block for block in BLOCK_HEADS if heads <= block)


def q_map(q: View) -> TensorMapSpec:
    """The queries as (b, s_q, heads, head_dim), fetched token by token."""
    b, s_q, heads, head_dim = q.shape
    strides = (q.strides[2] if heads > 1 else head_dim, q.strides[1] if s_q > 1 else head_dim)
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(head_dim, heads, s_q, b),
        strides_bytes=(*strides, q.strides[0] if b > 1 else head_dim),
        box=(HEAD_DIM, block_heads(heads), 1, 1),
    )


def cache_maps(cache: View) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The codes of whole pages; and pages as rows of 256 bytes, of which the last has the scales."""
    pages = cache.shape[0]
    page_bytes = cache.strides[0] if pages > 1 else _PAGE_BYTES
    codes = TensorMapSpec(
        cache.dtype,
        cache.ptr,
        dims=(HEAD_DIM, PAGE_KEYS, pages),
        strides_bytes=(HEAD_DIM, page_bytes),
        box=(HEAD_DIM, PAGE_KEYS, 1),
    )
    scales = TensorMapSpec(
        cache.dtype,
        cache.ptr,
        dims=(_SCALE_BYTES, _PAGE_BYTES // _SCALE_BYTES, pages),
        strides_bytes=(_SCALE_BYTES, page_bytes),
        box=(_SCALE_BYTES, 1, 1),
        swizzle="none",
    )
    return codes, scales


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries, codes and scales."""
    codes, scales = cache_maps(call.view("cache"))
    return ("q", q_map(call.view("q"))), ("cache", codes), ("cache", scales)


KERNEL = LogitsKernel(
    "indexer_logits_sm90_paged",
    "indexer logits of cached keys with WGMMA and TMA, for up to 8 next tokens",
    "indexer/logits/sm90_paged.cu",
    LogitsParams,
    HOPPER,
    variants=_VARIANTS,
    facts={"page_keys": PAGE_KEYS, "max_short_line": _SHORT_LINE},
    unsupported=unsupported,
    variant=variant,
    tile_keys=PAGE_KEYS,
    short_line=_SHORT_LINE,
    maps=maps,
)
