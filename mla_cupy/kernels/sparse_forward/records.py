"""The kernels of the sparse forward from FP8 records."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.generic import from_records, not_on_hopper
from mla_cupy.kernels.attention.kernel import READS_RECORDS, AttentionKernel, identifiers, narrowest
from mla_cupy.kernels.attention.records import READ_FORWARD, rows_variant
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.sparse_forward.problem import SparseForwardProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_ROWS = (16, 32)


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if not problem.record:
        return READS_RECORDS
    return None if device.arch in HOPPER else needs_cc(device, "9.0")


def variant(problem: SparseForwardProblem, device: DeviceInfo) -> Variant:
    """The build for the heads: the narrowest that holds them, or several blocks of the widest."""
    return rows_variant(problem, narrowest(BLOCK_ROWS, problem.h_q))


SMALL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90_records",
    "sparse forward from FP8 records with WGMMA, with swapped operands: blocks of up to 32 heads",
    "sparse_forward/sm90_records.cu",
    DecodeParams,
    HOPPER,
    variants(dtype=HALF, record=identifiers(READ_FORWARD), block_rows=BLOCK_ROWS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=variant,
    block_rows=BLOCK_ROWS[-1],
)


GENERIC = from_records(
    "sparse_forward_generic_records",
    "sparse forward from FP8 records on CUDA cores, for any GPU from sm_75 on",
    "sparse_forward/generic_records.cu",
    DecodeParams,
    READ_FORWARD,
    is_default=not_on_hopper,
)


KERNELS = (SMALL, GENERIC)
