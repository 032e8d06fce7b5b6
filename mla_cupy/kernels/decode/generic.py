"""Launcher of `generic/dense_decode.cu`."""

from __future__ import annotations

from mla_cupy.launchers import decode_problem
from mla_cupy.launchers.decode_problem import HEAD_DIM_V, DecodeGeometry, DecodeProblem, HeadDimVariant
from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, any_arch
from mla_cupy.runtime.device import DeviceInfo

BLOCK_M = 8
BLOCKS_PER_SM = 2

SPEC = KernelSpec(
    "dense_decode_generic",
    "generic/dense_decode.cu",
    # Keys without RoPE columns are for sparse attention.
    variants=(*DTYPE_VARIANTS, *(HeadDimVariant(v.dtype, HEAD_DIM_V) for v in DTYPE_VARIANTS)),
    core=DTYPE_VARIANTS,
    supports_arch=any_arch,
    params=decode_problem.PARAMS,
)


def unsupported(problem: DecodeProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.cc < (7, 5):
        return f"needs compute capability 7.5, {device.name} has {device.cc[0]}.{device.cc[1]}"
    return ""


def geometry(problem: DecodeProblem, device: DeviceInfo) -> DecodeGeometry:
    """A few blocks share an SM."""
    return decode_problem.cut(problem.rows, BLOCK_M, BLOCKS_PER_SM * device.sm_count, problem.h_kv)
