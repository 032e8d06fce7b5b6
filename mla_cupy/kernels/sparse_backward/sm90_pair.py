"""Launcher of `sm90/sparse_backward_pair.cu`."""

from __future__ import annotations

from mla_cupy.launchers import sparse_backward_sm90, sparse_problem
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem, SparseBackwardVariant
from mla_cupy.launchers.spec import KernelSpec, only_sm90a
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3

HEADS_PER_ADDITION = 128
"""Heads whose contributions to a row of kv are summed before they are added to it."""
DKV_ORDER = sparse_problem.DKV_ORDER_SM90
CLUSTER = 2
"""Blocks that share a query."""

SPEC = KernelSpec(
    "sparse_backward_sm90_pair",
    "sm90/sparse_backward_pair.cu",
    variants=sparse_problem.VARIANTS,
    core=sparse_problem.CORE,
    supports_arch=only_sm90a,
    params=sparse_problem.PARAMS,
)


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    reason = sparse_backward_sm90.unsupported(problem, device)
    if reason:
        return reason
    if device.sm_count < CLUSTER:
        return f"needs {CLUSTER} SMs, {device.name} has {device.sm_count}"
    fewest = HEADS_PER_ADDITION // CLUSTER + 1
    if not fewest <= problem.h_q <= HEADS_PER_ADDITION:
        return f"is for {fewest} to {HEADS_PER_ADDITION} heads, not {problem.h_q}"
    return ""


def variant(problem: SparseBackwardProblem) -> SparseBackwardVariant:
    """The build that it takes."""
    return sparse_problem.plain_variant(problem)


def geometry(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """The grid: a block on each SM, in pairs, each of which takes every so many queries."""
    pairs = max(1, min(device.sm_count // CLUSTER, problem.s_q))
    return (CLUSTER * pairs, 1, 1)
