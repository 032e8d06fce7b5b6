"""Launcher of `generic/dense_decode.cu` for sparse attention: pages of one token."""

from __future__ import annotations

from mla_cupy.launchers import dense_decode_generic
from mla_cupy.launchers.decode_problem import HEAD_DIM_QK, DecodeGeometry, HeadDimVariant, cut
from mla_cupy.launchers.dense_decode_generic import BLOCK_M, BLOCKS_PER_SM
from mla_cupy.launchers.sparse_forward_problem import SparseForwardProblem
from mla_cupy.launchers.spec import DtypeVariant, Variant
from mla_cupy.runtime.device import DeviceInfo

SPEC = dense_decode_generic.SPEC


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.cc < (7, 5):
        return f"needs compute capability 7.5, {device.name} has {device.cc[0]}.{device.cc[1]}"
    return ""


def variant(problem: SparseForwardProblem) -> Variant:
    """The build that it takes: that of dense decode, where the keys are as wide."""
    if problem.d_qk == HEAD_DIM_QK:
        return DtypeVariant(problem.dtype)
    return HeadDimVariant(problem.dtype, problem.d_qk)


def geometry(problem: SparseForwardProblem, device: DeviceInfo) -> DecodeGeometry:
    """A few blocks share an SM."""
    return cut(problem.h_q, BLOCK_M, BLOCKS_PER_SM * device.sm_count)
