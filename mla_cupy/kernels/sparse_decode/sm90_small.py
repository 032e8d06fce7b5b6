"""Host side of `sparse_decode/sm90_small.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.attention.records import BLOCK_ROWS, SPARSE_RECORDS
from mla_cupy.kernels.params import SparseDecodeParams
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS


def unsupported(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


def block_rows(problem: SparseDecodeProblem, device: DeviceInfo) -> int:
    """Heads of a block: the fewest that hold all of them, or 16 where every block then has one tile."""
    blocks = -(-problem.h_q // 16) * problem.queries * problem.tiles
    wide = next((rows for rows in BLOCK_ROWS if problem.h_q <= rows), BLOCK_ROWS[-1])
    return 16 if wide > 16 and blocks <= device.sm_count else wide


def variant(problem: SparseDecodeProblem, rows: int) -> Variant:
    """The build for blocks of so many heads."""
    return Variant(dtype=problem.dtype, record=problem.record, block_rows=rows)


KERNEL: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm90_small",
    "sparse decode from FP8 records with WGMMA, with swapped operands: blocks of up to 32 heads",
    "sparse_decode/sm90_small.cu",
    SparseDecodeParams,
    HOPPER,
    variants(dtype=HALF, record=SPARSE_RECORDS, block_rows=BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    block_rows=BLOCK_ROWS[-1],
)
