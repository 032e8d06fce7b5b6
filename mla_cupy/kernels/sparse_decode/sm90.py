"""Host side of `sparse_decode/sm90.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.records import BLOCK_ROWS as SMALL_BLOCK_ROWS
from mla_cupy.kernels.attention.records import SPARSE_RECORDS, record_variant
from mla_cupy.kernels.params import SparseDecodeParams
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.spec import HOPPER, Reason, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 64
SHORT_SPLIT = 4
"""Tiles per split of blocks of 32 heads up to which these are faster."""


def unsupported(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.h_q <= SMALL_BLOCK_ROWS[-1]:
        return Reason(f"is for more than {SMALL_BLOCK_ROWS[-1]} heads")
    return None if problem.aligned else needs_alignment("q")


def preferred(problem: SparseDecodeProblem, device: DeviceInfo) -> bool:
    """Blocks of 32 heads have fewer partial results and their first tile earlier, but take longer per tile."""
    row_blocks = -(-problem.h_q // SMALL_BLOCK_ROWS[-1])
    tiles = -(-problem.queries * problem.tiles * row_blocks // device.sm_count)
    return tiles > SHORT_SPLIT


KERNEL: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm90",
    "sparse decode from FP8 records with WGMMA: the seesaw schedule over dequantised tiles, for more than 32 heads",
    "sparse_decode/sm90.cu",
    SparseDecodeParams,
    HOPPER,
    variants(dtype=HALF, record=SPARSE_RECORDS),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    preferred=preferred,
    variant=record_variant,
    block_rows=BLOCK_M,
)
