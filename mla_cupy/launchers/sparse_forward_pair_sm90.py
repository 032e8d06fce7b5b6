"""Launcher of `sm90/sparse_forward_pair.cu`.

It has run in the simulator and not on a GPU yet. Until it has been measured against `sparse_forward_sm90`, which gives
the same results, it runs only where `variant=` names it.
"""

from __future__ import annotations

from mla_cupy.launchers import sparse_forward_sm90
from mla_cupy.launchers.decode_problem import DecodeGeometry
from mla_cupy.launchers.sparse_forward_problem import SparseForwardProblem
from mla_cupy.launchers.spec import KernelSpec, Variant, only_sm90a
from mla_cupy.runtime.device import DeviceInfo

ON_REQUEST = True
"""Not chosen by itself: see `choice.choose`."""
CLUSTER = 2
"""Blocks that share a query."""
MOST_HEADS = CLUSTER * sparse_forward_sm90.BLOCK_M
FEWEST_HEADS = sparse_forward_sm90.BLOCK_M + 1

SPEC = KernelSpec(
    "sparse_forward_pair_sm90",
    "sm90/sparse_forward_pair.cu",
    variants=sparse_forward_sm90.SPEC.variants,
    core=(),
    supports_arch=only_sm90a,
    params=sparse_forward_sm90.SPEC.params,
)


def unsupported(problem: SparseForwardProblem, device: DeviceInfo) -> str:
    """Why the kernel cannot take the problem; empty if it can."""
    reason = sparse_forward_sm90.unsupported(problem, device)
    if reason:
        return reason
    if device.sm_count < CLUSTER:
        return f"needs {CLUSTER} SMs, {device.name} has {device.sm_count}"
    if not FEWEST_HEADS <= problem.h_q <= MOST_HEADS:
        return f"is for {FEWEST_HEADS} to {MOST_HEADS} heads, not {problem.h_q}"
    return ""


def variant(problem: SparseForwardProblem) -> Variant:
    """The build that it takes."""
    return sparse_forward_sm90.variant(problem)


def geometry(problem: SparseForwardProblem, device: DeviceInfo) -> DecodeGeometry:
    """The two blocks of heads are the cluster, in each of the parts."""
    return sparse_forward_sm90.geometry(problem, device)
