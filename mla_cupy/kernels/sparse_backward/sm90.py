"""Launcher of `sm90/sparse_backward.cu`."""

from __future__ import annotations

from mla_cupy.launchers import sparse_problem
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem, SparseBackwardVariant
from mla_cupy.launchers.spec import KernelSpec, only_sm90a
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3

HEADS_PER_ADDITION = 64
"""Heads whose contributions to a row of kv are summed before they are added to it."""
DKV_ORDER = sparse_problem.DKV_ORDER_SM90

SPEC = KernelSpec(
    "sparse_backward_sm90",
    "sm90/sparse_backward.cu",
    variants=sparse_problem.VARIANTS,
    core=sparse_problem.CORE,
    supports_arch=only_sm90a,
    params=sparse_problem.PARAMS,
)


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    if device.arch != "sm_90a":
        return f"needs compute capability 9.0, {device.name} has {device.cc[0]}.{device.cc[1]}"
    if not problem.aligned:
        return "needs q, kv, dout and dq that start at, and step by, multiples of 16 bytes"
    return ""


def variant(problem: SparseBackwardProblem) -> SparseBackwardVariant:
    """The build that it takes."""
    return sparse_problem.plain_variant(problem)


def geometry(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """The grid: a block on each SM, which takes every so many items of 64 heads of a query."""
    items = problem.s_q * -(-problem.h_q // HEADS_PER_ADDITION)
    return (max(1, min(device.sm_count, items)), 1, 1)
