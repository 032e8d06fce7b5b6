"""Host side of `sparse_forward/sm90_small.cu`."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.sparse_forward import sm90
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import TILE_TOKENS

BLOCK_HEADS = (16, 32)


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if reason := sm90.unsupported(problem, device):
        return reason
    return Reason(f"takes at most {BLOCK_HEADS[-1]} heads") if problem.h_q > BLOCK_HEADS[-1] else None


def variant(problem: SparseForwardProblem) -> Variant:
    """The build that it takes."""
    heads = next(heads for heads in BLOCK_HEADS if problem.h_q <= heads)
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk, block_heads=heads)


KERNEL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90_small",
    "sparse forward with WGMMA for up to 32 heads, with swapped operands",
    "sparse_forward/sm90_small.cu",
    DecodeParams,
    HOPPER,
    variants=variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK, block_heads=BLOCK_HEADS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=variant,
    block_rows=BLOCK_HEADS[-1],
)
