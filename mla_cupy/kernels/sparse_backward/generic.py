"""Launcher of `generic/sparse_backward.cu`."""

from __future__ import annotations

from mla_cupy.launchers import sparse_problem
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem, SparseBackwardVariant
from mla_cupy.launchers.spec import KernelSpec, any_arch
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3

HEADS_PER_ADDITION = 8
"""Heads whose contributions to a row of kv are summed before they are added to it."""
DKV_ORDER = sparse_problem.DKV_ORDER_PLAIN

SPEC = KernelSpec(
    "sparse_backward_generic",
    "generic/sparse_backward.cu",
    variants=sparse_problem.VARIANTS,
    core=sparse_problem.CORE,
    supports_arch=any_arch,
    params=sparse_problem.PARAMS,
)


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.cc < (7, 5):
        return f"needs compute capability 7.5, {device.name} has {device.cc[0]}.{device.cc[1]}"
    return ""


def variant(problem: SparseBackwardProblem) -> SparseBackwardVariant:
    """The build that it takes."""
    return sparse_problem.plain_variant(problem)


def geometry(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """The grid: one block for each query and 8 heads."""
    return (problem.s_q * -(-problem.h_q // HEADS_PER_ADDITION), 1, 1)
