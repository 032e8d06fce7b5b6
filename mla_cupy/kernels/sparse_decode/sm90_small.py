"""Host side of `sparse_decode/sm90_small.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.decode.problem import PARAMS, AttentionKernel
from mla_cupy.kernels.decode.records import BLOCK_ROWS, RECORDS, SmallRecordVariant, small_record_variant
from mla_cupy.kernels.sparse_decode.problem import SparseDecodeProblem
from mla_cupy.kernels.spec import HOPPER, Reason, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS


def unsupported(problem: SparseDecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


KERNEL: AttentionKernel[SparseDecodeProblem] = AttentionKernel(
    "sparse_decode_sm90_small",
    "sparse decode from FP8 records with WGMMA, with swapped operands: blocks of up to 32 heads",
    "sparse_decode/sm90_small.cu",
    PARAMS,
    HOPPER,
    tuple(SmallRecordVariant(dtype, record, rows) for dtype in HALF for record in RECORDS for rows in BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=lambda problem: small_record_variant(problem, problem.h_q),
    block_rows=BLOCK_ROWS[-1],
)
