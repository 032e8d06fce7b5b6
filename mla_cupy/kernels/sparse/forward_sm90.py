"""Launcher of `sm90/sparse_forward.cu`."""

from __future__ import annotations

from mla_cupy.launchers import decode_problem
from mla_cupy.launchers.decode_problem import DecodeGeometry, HeadDimVariant
from mla_cupy.launchers.sparse_forward_problem import HEAD_DIMS_QK, SparseForwardProblem
from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Variant, only_sm90a
from mla_cupy.runtime.device import DeviceInfo

BLOCK_M = 64

SPEC = KernelSpec(
    "sparse_forward_sm90",
    "sm90/sparse_forward.cu",
    variants=tuple(HeadDimVariant(v.dtype, d_qk) for v in DTYPE_VARIANTS for d_qk in HEAD_DIMS_QK),
    core=(HeadDimVariant("bfloat16", 576),),
    supports_arch=only_sm90a,
    params=decode_problem.PARAMS,
)


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.arch != "sm_90a":
        return f"needs compute capability 9.0, {device.name} has {device.cc[0]}.{device.cc[1]}"
    if not problem.aligned:
        return "needs q and kv to start at, and step by, multiples of 16 bytes"
    return ""


def variant(problem: SparseForwardProblem) -> Variant:
    """The build that it takes."""
    return HeadDimVariant(problem.dtype, problem.d_qk)


def geometry(problem: SparseForwardProblem, device: DeviceInfo) -> DecodeGeometry:
    """A block fills an SM."""
    return decode_problem.cut(problem.h_q, BLOCK_M, device.sm_count)
