"""Launcher of `sm90/sparse_forward_small.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.launchers import decode_problem, sparse_forward_sm90
from mla_cupy.launchers.decode_problem import DecodeGeometry
from mla_cupy.launchers.sparse_forward_problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Variant, only_sm90a
from mla_cupy.runtime.device import DeviceInfo

BLOCK_HEADS = (16, 32)


@dataclass(frozen=True)
class SmallVariant(Variant):
    """`block_heads` is how many heads a block computes, whether they are there or not."""

    dtype: str
    head_dim_qk: int
    block_heads: int


SPEC = KernelSpec(
    "sparse_forward_small_sm90",
    "sm90/sparse_forward_small.cu",
    variants=tuple(
        SmallVariant(v.dtype, d_qk, heads) for v in DTYPE_VARIANTS for d_qk in HEAD_DIMS_QK for heads in BLOCK_HEADS
    ),
    core=(),
    supports_arch=only_sm90a,
    params=decode_problem.PARAMS,
)


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    why = sparse_forward_sm90.unsupported(problem, device)
    if not why and problem.h_q > BLOCK_HEADS[-1]:
        why = f"takes at most {BLOCK_HEADS[-1]} heads"
    return why


def variant(problem: SparseForwardProblem) -> Variant:
    """The build that it takes."""
    heads = next(heads for heads in BLOCK_HEADS if problem.h_q <= heads)
    return SmallVariant(problem.dtype, problem.d_qk, heads)


def geometry(problem: SparseForwardProblem, device: DeviceInfo) -> DecodeGeometry:
    """A block fills an SM, and has all heads."""
    return decode_problem.cut(problem.h_q, BLOCK_HEADS[-1], device.sm_count)
