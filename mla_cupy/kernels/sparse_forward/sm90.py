"""The kernels of the sparse forward over 16-bit rows on Hopper."""

from __future__ import annotations

from mla_cupy.dtypes import HALF
from mla_cupy.kernels.attention.kernel import READS_ROWS, AttentionKernel
from mla_cupy.kernels.params import DecodeParams
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.kernels.spec import HOPPER, Reason, Variant, needs_alignment, needs_cc, variants
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import D_QK, TILE_TOKENS

BLOCK_M = 64
BLOCK_HEADS = (16, 32)
"""Heads of a block of the kernel for few heads, a build each."""


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    if problem.record:
        return READS_ROWS
    return None if problem.aligned else needs_alignment("q and kv")


SEESAW: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90",
    "sparse forward with WGMMA: the seesaw schedule over gathered rows",
    "sparse_forward/sm90.cu",
    DecodeParams,
    HOPPER,
    variants=variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK),
    core=(Variant(dtype="bfloat16", head_dim_qk=D_QK),),
    facts={"block_m": BLOCK_M, "tile_tokens": TILE_TOKENS},
    unsupported=unsupported,
    variant=lambda problem, device: Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk),
    block_rows=BLOCK_M,
)


def _not_by_small(problem: SparseForwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if reason := unsupported(problem, device):
        return reason
    return Reason(f"takes at most {BLOCK_HEADS[-1]} heads") if problem.h_q > BLOCK_HEADS[-1] else None


def _small_variant(problem: SparseForwardProblem, device: DeviceInfo) -> Variant:
    """The build for a problem."""
    heads = next(heads for heads in BLOCK_HEADS if problem.h_q <= heads)
    return Variant(dtype=problem.dtype, head_dim_qk=problem.d_qk, block_heads=heads)


SMALL: AttentionKernel[SparseForwardProblem] = AttentionKernel(
    "sparse_forward_sm90_small",
    "sparse forward with WGMMA for up to 32 heads, with swapped operands",
    "sparse_forward/sm90_small.cu",
    DecodeParams,
    HOPPER,
    variants=variants(dtype=HALF, head_dim_qk=HEAD_DIMS_QK, block_heads=BLOCK_HEADS),
    facts={"tile_tokens": TILE_TOKENS},
    unsupported=_not_by_small,
    variant=_small_variant,
    block_rows=BLOCK_HEADS[-1],
)


KERNELS = (SMALL, SEESAW)
