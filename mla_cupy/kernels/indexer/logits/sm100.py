"""Host side of `indexer/logits/sm100.cu`, of contiguous and of paged keys."""

from __future__ import annotations

from mla_cupy.arrays.view import View
from mla_cupy.kernels.indexer.logits.problem import (
    BLOCK_TOKENS,
    CODES,
    HEAD_DIMS,
    MAX_HEADS,
    NO_E2M1,
    LogitsKernel,
    LogitsProblem,
)
from mla_cupy.kernels.indexer.logits.sm90 import PIECE_BYTES, TILE_HEADS, k_map
from mla_cupy.kernels.indexer.logits.sm90_paged import HEAD_DIM, PAGE_KEYS, cache_maps
from mla_cupy.kernels.params import LogitsParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.spec import BLACKWELL, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec

TILE_KEYS = 128
_SHORT_LINE = 128
_WIDTHS = (1, 2, 4, BLOCK_TOKENS)
"""Tokens of a block of paged calls, a build each."""


def unsupported(problem: LogitsProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    if problem.dtype != CODES[0]:
        return Reason(f"takes e4m3, not {problem.dtype}")
    if problem.accumulate != "float32":
        return Reason("adds in float32")
    if problem.heads > MAX_HEADS:
        return Reason(f"takes at most {MAX_HEADS} heads, not {problem.heads}")
    if problem.page_size and (reason := _not_in_pages(problem)):
        return reason
    return problem.countable(TILE_KEYS) if problem.aligned else needs_alignment("q and k")


def _not_in_pages(problem: LogitsProblem) -> Reason | None:
    """Reason why the kernel does not support paged keys; None if it does."""
    if problem.e2m1:
        return NO_E2M1
    if problem.head_dim != HEAD_DIM:
        return Reason(f"takes keys of {HEAD_DIM} codes, not of {problem.head_dim}")
    if problem.page_size != PAGE_KEYS or problem.num_pages == 0:
        return Reason(f"takes pages of {PAGE_KEYS} keys, not {problem.num_pages} of {problem.page_size}")
    if problem.block_tokens > BLOCK_TOKENS:
        return Reason(f"takes at most {BLOCK_TOKENS} tokens of a sequence, not {problem.block_tokens}")
    return None


def _width(tokens: int) -> int:
    return next(width for width in _WIDTHS if tokens <= width)


def _q_map(q: View, blocks: int, axes: tuple[int, int, int], width: int) -> TensorMapSpec:
    """The queries as (blocks, heads, tokens, head_dim), fetched as 8 heads of the tokens of a block.

    `axes` are the axes of tokens, heads and blocks; -1 if there is no axis of blocks.
    """
    tokens, heads, head_dim = q.shape[axes[0]], q.shape[axes[1]], q.shape[-1]
    sizes = (tokens, heads, blocks)
    return TensorMapSpec(
        q.dtype,
        q.ptr,
        dims=(head_dim, *sizes),
        strides_bytes=tuple(q.strides[axis] if size > 1 else head_dim for axis, size in zip(axes, sizes, strict=True)),
        box=(PIECE_BYTES, width, TILE_HEADS, 1),
    )


def maps(call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Queries, and contiguous keys or the codes of pages."""
    q = call.view("q")
    if "cache" not in call.views:
        return ("q", _q_map(q, 1, (0, 1, -1), BLOCK_TOKENS)), ("k", k_map(call.view("k")))
    queries = _q_map(q, q.shape[0], (1, 2, 0), _width(q.shape[1]))
    return ("q", queries), ("cache", cache_maps(call.view("cache"))[0])


def variant(problem: LogitsProblem) -> Variant:
    """The build for a problem."""
    tokens = _width(problem.block_tokens) if problem.page_size else BLOCK_TOKENS
    return Variant(head_dim=problem.head_dim, block_tokens=tokens, paged=int(problem.page_size > 0))


KERNEL = LogitsKernel(
    "indexer_logits_sm100",
    "indexer logits of e4m3 with tcgen05 and TMA, of contiguous and of cached keys; simulated, not yet run on hardware",
    "indexer/logits/sm100.cu",
    LogitsParams,
    BLACKWELL,
    (
        *variants(head_dim=HEAD_DIMS, block_tokens=(BLOCK_TOKENS,), paged=(0,)),
        *variants(head_dim=(HEAD_DIM,), block_tokens=_WIDTHS, paged=(1,)),
    ),
    facts={"tile_keys": TILE_KEYS, "max_short_line": _SHORT_LINE},
    unsupported=unsupported,
    variant=variant,
    tile_keys=lambda problem: TILE_KEYS,
    short_line=_SHORT_LINE,
    maps=maps,
    unproven=True,
)
