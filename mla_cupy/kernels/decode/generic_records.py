"""Host side of `decode/generic_records.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.decode import generic
from mla_cupy.kernels.decode.problem import PARAMS, READS_RECORDS, AttentionKernel, DecodeProblem
from mla_cupy.kernels.decode.records import DENSE_RECORDS, RecordVariant, record_variant
from mla_cupy.kernels.spec import Reason
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_M = 8


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    return generic.unsupported(problem, device) if problem.record else READS_RECORDS


KERNEL: AttentionKernel[DecodeProblem] = AttentionKernel(
    "decode_generic_records",
    "dense decode from FP8 records on CUDA cores, for any GPU from sm_75 on",
    "decode/generic_records.cu",
    PARAMS,
    variants=tuple(RecordVariant(dtype, record) for dtype in HALF for record in DENSE_RECORDS),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=record_variant,
    block_rows=BLOCK_M,
    blocks_per_sm=2,
    fallback=True,
)
