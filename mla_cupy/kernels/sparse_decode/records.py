"""The kernels of sparse decode, which read FP8 records."""

from __future__ import annotations

from typing import cast

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention import mma
from mla_cupy.kernels.attention.generic import from_records, not_on_hopper
from mla_cupy.kernels.attention.kernel import (
    READS_V41,
    AttentionKernel,
    identifiers,
    narrowest,
)
from mla_cupy.kernels.attention.records import (
    BLOCK_ROWS,
    COMPACT,
    PLAIN_RECORDS,
    READ_FORWARD,
    READ_SPARSE,
    record_variant,
    rows_variant,
)
from mla_cupy.kernels.params import SparseDecodeParams
from mla_cupy.kernels.sparse_decode.heuristics import SMALL_BLOCK_TILES
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.sparse_forward import sm90_fp8
from mla_cupy.kernels.spec import BLACKWELL, HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64
_RECORDS = identifiers(READ_SPARSE)


def with_compact(variant: Variant, problem: SparseDecodeProblem) -> Variant:
    """The build for a second cache of the compact record, if there is one."""
    return variant.extended(compact=1) if problem.compact else variant


def _not_by_small(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


def _not_by_seesaw(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    reason = _not_by_small(problem, device)
    if reason is not None:
        return reason
    if problem.h_q <= BLOCK_ROWS[-1]:
        return Reason(f"is for more than {BLOCK_ROWS[-1]} heads")
    return None if problem.aligned else needs_alignment("q")


def _seesaw_is_faster(problem: SparseDecodeProblem, device: DeviceInfo) -> bool:
    """Blocks of 32 heads have fewer partial results and their first tile earlier, but take longer per tile.

    The choice for a batch-invariant call depends on the heads alone.
    """
    if problem.piece_tiles:
        return True
    row_blocks = -(-problem.h_q // BLOCK_ROWS[-1])
    tiles = -(-problem.queries * problem.tiles * row_blocks // device.sm_count)
    return tiles > SMALL_BLOCK_TILES


SEESAW: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm90",
    "sparse decode from FP8 records with WGMMA: the seesaw schedule over dequantised tiles, for more than 32 heads",
    "sparse_decode/sm90.cu",
    SparseDecodeParams,
    HOPPER,
    (*variants(dtype=HALF, record=_RECORDS), *variants(dtype=HALF, record=tuple(COMPACT), compact=(1,))),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=_not_by_seesaw,
    preferred=_seesaw_is_faster,
    variant=lambda problem, device: with_compact(record_variant(problem, device), problem),
    block_rows=BLOCK_M,
)


def small_block_rows(problem: SparseDecodeProblem, device: DeviceInfo) -> int:
    """Heads of a block: the fewest that hold all of them, or 16 where every block then has one tile."""
    blocks = -(-problem.h_q // 16) * problem.queries * problem.tiles
    wide = narrowest(BLOCK_ROWS, problem.h_q)
    if problem.piece_tiles:
        return wide
    return 16 if wide > 16 and blocks <= device.sm_count else wide


SMALL: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm90_small",
    "sparse decode from FP8 records with WGMMA, with swapped operands: blocks of up to 32 heads",
    "sparse_decode/sm90_small.cu",
    SparseDecodeParams,
    HOPPER,
    (
        *variants(dtype=HALF, record=_RECORDS, block_rows=BLOCK_ROWS),
        *variants(dtype=HALF, record=tuple(COMPACT), block_rows=BLOCK_ROWS, compact=(1,)),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_not_by_small,
    variant=lambda problem, device: with_compact(rows_variant(problem, small_block_rows(problem, device)), problem),
    block_rows=BLOCK_ROWS[-1],
)


BLACKWELL_BLOCK_ROWS = (16, 32, 64)
"""Numbers of heads that a block of the kernel for Blackwell may compute."""


def _not_on_blackwell(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    return READS_V41 if problem.record in PLAIN_RECORDS else None


SM100: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm100",
    "sparse decode from FP8 records with tcgen05: blocks of 16, 32 or 64 heads; simulated, not yet run",
    "sparse_decode/sm100.cu",
    SparseDecodeParams,
    BLACKWELL,
    variants(dtype=HALF, record=identifiers(READ_FORWARD), block_rows=BLACKWELL_BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_not_on_blackwell,
    variant=lambda problem, device: rows_variant(problem, narrowest(BLACKWELL_BLOCK_ROWS, problem.h_q)),
    block_rows=BLACKWELL_BLOCK_ROWS[-1],
    unproven=True,
)


MMA = mma.from_records(
    "sparse_decode_mma",
    "sparse decode from FP8 records",
    "sparse_decode/mma.cu",
    SparseDecodeParams,
    READ_SPARSE,
    rows=lambda problem: problem.h_q,
)


GENERIC = from_records(
    "sparse_decode_generic",
    "sparse decode from FP8 records on CUDA cores, for any GPU from sm_75 on",
    "sparse_decode/generic.cu",
    SparseDecodeParams,
    READ_SPARSE,
    is_default=not_on_hopper,
)


#: The sparse forward's kernel, over lists of the valid slots.
FP8 = cast("AttentionKernel[SparseDecodeProblem]", sm90_fp8.KERNEL)

KERNELS = (SEESAW, SMALL, SM100, MMA, GENERIC, FP8)
