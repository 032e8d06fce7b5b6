"""Host side of `decode/sm90_records.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_RECORDS, AttentionKernel
from mla_cupy.kernels.attention.records import BLOCK_ROWS, TREE_BLOCK_ROWS
from mla_cupy.kernels.decode.problem import DecodeProblem, tree_record_variant
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.spec import HOPPER, Reason, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

READ = ("v32", "v4", "fp8")


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if not problem.record:
        return READS_RECORDS
    if problem.record not in READ:
        return Reason("reads records of " + " and ".join(READ))
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_sm90_records",
    "dense decode from FP8 records with WGMMA, with swapped operands: blocks of up to 32 query rows",
    "decode/sm90_records.cu",
    DecodeParams,
    HOPPER,
    (
        *variants(dtype=HALF, record=READ, block_rows=BLOCK_ROWS),
        *variants(dtype=HALF, record=READ, block_rows=TREE_BLOCK_ROWS, tree_mask=(1,)),
    ),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=tree_record_variant,
    block_rows=BLOCK_ROWS[-1],
)
