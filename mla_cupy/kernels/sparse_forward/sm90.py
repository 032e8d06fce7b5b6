"""Host side of `sparse_forward/sm90.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_ROWS, AttentionKernel
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, TILE_TOKENS

BLOCK_M = 64


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv")


KERNEL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90",
    "sparse forward with WGMMA: the seesaw schedule over gathered rows",
    "sparse_forward/sm90.cu",
    DecodeParams,
    HOPPER,
    variants=variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK),
    core=(Variant(dtype="bfloat16", head_dim_qk=D_QK),),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=lambda problem: Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk),
    block_rows=BLOCK_M,
)
