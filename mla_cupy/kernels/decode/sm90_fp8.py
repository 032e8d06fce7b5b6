"""Host side of `decode/sm90_fp8.cu`."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_RECORDS, SINK, AttentionKernel, narrowest
from mla_cupy.kernels.decode.heuristics import SMALL_FP8_TILES
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeFp8Params
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_QK, D_ROPE, TILE_TOKENS

QUERIES = (*HALF, "float8_e4m3fn")
"""Dtypes of queries: 16-bit queries are rounded on their way into shared memory."""
BLOCK_ROWS = (16, 32, 64)
"""Rows of the builds; with a tree of drafts, which has rows enough, the widest alone."""
TERMS = "fp8x2"
"""Arithmetic of the builds that represent weights, and 16-bit queries, as sums of two e4m3 numbers."""
LEAST_ROWS_OF_TERMS = 17
"""Query rows from which these are used: their blocks have 64, and with fewer rows conversion is faster."""
SMALL_BLOCKS = 32
"""Rows of blocks that get few tiles each."""
PANEL_COLUMNS = 128
"""Columns of one TMA box of latent columns: the span of the swizzle."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if problem.record != "fp8":
        return Reason('reads the record "fp8"') if problem.record else READS_RECORDS
    if device.arch not in HOPPER:
        return Reason(f"{needs_cc(device, '9.0')}: leave fp8.math out for kernels that convert")
    if problem.math == TERMS:
        return _unsupported_terms(problem)
    return None


def _unsupported_terms(problem: DecodeProblem) -> Reason | None:
    """Reason that two terms are not for the problem; None if they are."""
    other = 'pass fp8=Fp8("fp8"), or leave fp8.math out'
    if problem.tree_mask:
        return Reason(f"takes no tree_mask with fp8.math={TERMS!r}: {other}")
    if problem.rows < LEAST_ROWS_OF_TERMS:
        rows = f"{problem.rows} query rows (s_q * h_q)"
        return Reason(f"takes {LEAST_ROWS_OF_TERMS} and more, not {rows}, with fp8.math={TERMS!r}: {other}")
    return None


def variant(problem: DecodeProblem, device: DeviceInfo) -> Variant:
    """The narrowest build that holds the rows; more rows than the widest has are divided among blocks."""
    if problem.math == TERMS:
        return Variant(dtype=problem.dtype, block_rows=BLOCK_ROWS[-1], terms=2)
    if problem.tree_mask:
        return Variant(dtype=problem.dtype, block_rows=BLOCK_ROWS[-1], tree_mask=1)
    return Variant(dtype=problem.dtype, block_rows=narrowest(BLOCK_ROWS, problem.rows))


def kv_maps(kv_cache: View, variant: Variant) -> tuple[TensorMapSpec, TensorMapSpec]:
    """The cache as (pages, 1, tokens, bytes): boxes of 128 latent columns, and of the RoPE columns.

    Boxes have gcd(page_size, 64) tokens. In boxes of one token, the RoPE columns occupy a row of 128 bytes in shared
    memory, since a box begins at a multiple of that; bytes past the record's end are zeros. Without a page nothing is
    fetched, but the map has one: the driver rejects empty maps.
    """
    num_pages, page_size, width = kv_cache.shape
    page, token, _ = kv_cache.strides
    rows = min(TILE_TOKENS, page_size & -page_size)
    rope, swizzle = (PANEL_COLUMNS, "128B") if rows == 1 else (D_ROPE, "64B")

    def boxes(columns: int, swizzle: str) -> TensorMapSpec:
        return TensorMapSpec(
            "uint8",
            kv_cache.ptr,
            dims=(D_QK, page_size, 1, max(1, num_pages)),
            strides_bytes=(token if page_size > 1 else width, width, page if num_pages > 1 else width),
            box=(columns, rows, 1, 1),
            swizzle=swizzle,
            l2="128B",
        )

    return boxes(PANEL_COLUMNS, "128B"), boxes(rope, swizzle)


def _sized(problem: DecodeProblem, device: DeviceInfo) -> AttentionKernel[DecodeProblem] | None:
    """The kernel in blocks of 32 rows where these get few tiles each: half the partial results per row."""
    if problem.batch is None or problem.tree_mask or problem.rows <= SMALL_BLOCKS:
        return None
    if problem.math == TERMS:
        return None
    row_blocks = -(-problem.rows // SMALL_BLOCKS)
    return _SMALL if problem.batch.tiles * row_blocks <= SMALL_FP8_TILES * device.sm_count else None


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_fp8",
    'dense decode from records "fp8" with both products in FP8 (math="fp8", "fp8x2"), promoted to float32 tile by tile',
    "decode/sm90_fp8.cu",
    DecodeFp8Params,
    HOPPER,
    (
        *variants(dtype=QUERIES, block_rows=BLOCK_ROWS),
        *variants(dtype=QUERIES, block_rows=BLOCK_ROWS[-1:], tree_mask=(1,)),
        *variants(dtype=QUERIES, block_rows=BLOCK_ROWS[-1:], terms=(2,)),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    facts_of=lambda build: {"block_m": build.block_rows},
    unsupported=unsupported,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
    kv_maps=kv_maps,
    math="fp8",
    bf16_partials=True,
    sized=_sized,
    other_math=(TERMS,),
    forms=SINK,
)
_SMALL = replace(
    KERNEL,
    variant=lambda problem, device: Variant(
        dtype=problem.dtype, block_rows=min(SMALL_BLOCKS, variant(problem, device).block_rows)
    ),
    block_rows=SMALL_BLOCKS,
)
