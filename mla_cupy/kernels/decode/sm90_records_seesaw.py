"""Host side of `decode/sm90_records_seesaw.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import NO_TREE, AttentionKernel
from mla_cupy.kernels.attention.records import BLOCK_ROWS as SMALL_BLOCK_ROWS
from mla_cupy.kernels.attention.records import DENSE_RECORDS, record_variant
from mla_cupy.kernels.decode import sm90_records
from mla_cupy.kernels.decode.problem import DecodeProblem
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, Reason, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64
SHORT_SPLIT = 5
"""Tiles per split of blocks of 32 rows up to which these are faster."""


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    reason = sm90_records.unsupported(problem, device)
    if reason is not None:
        return reason
    if problem.tree_mask:
        return NO_TREE
    if problem.s_q > 1 and problem.h_q % BLOCK_M:
        return Reason(f"takes several query tokens with multiples of {BLOCK_M} heads only")
    return None


def preferred(problem: DecodeProblem, device: DeviceInfo) -> bool:
    """For more rows than a block of the other kernel has, unless splits are short.

    Blocks of 32 rows have fewer partial results and their first tile earlier, but take longer per tile.
    """
    if problem.rows <= SMALL_BLOCK_ROWS[-1]:
        return False
    if problem.batch is None:
        return True
    row_blocks = -(-problem.rows // SMALL_BLOCK_ROWS[-1])
    return problem.batch.tiles * row_blocks > SHORT_SPLIT * device.sm_count


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_records_seesaw",
    "dense decode from FP8 records with WGMMA: the seesaw schedule over dequantised tiles, for more than 32 rows",
    "decode/sm90_records_seesaw.cu",
    DecodeParams,
    HOPPER,
    variants(dtype=HALF, record=DENSE_RECORDS),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    preferred=preferred,
    variant=record_variant,
    block_rows=BLOCK_M,
)
