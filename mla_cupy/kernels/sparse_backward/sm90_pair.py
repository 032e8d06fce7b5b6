"""Host side of `sparse_backward/sm90_pair.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import BackwardParams
from mla_cupy.kernels.sparse_backward import sm90
from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
)
from mla_cupy.kernels.spec import HOPPER, Reason
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

BLOCK_HEADS = 128
CLUSTER = 2
"""Blocks that share a query."""


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if reason := sm90.unsupported(problem, device):
        return reason
    if device.sm_count < CLUSTER:
        return Reason(f"needs {CLUSTER} SMs, {device.name} has {device.sm_count}")
    min_heads = BLOCK_HEADS // CLUSTER + 1
    if not min_heads <= problem.h_q <= BLOCK_HEADS:
        return Reason(f"is for {min_heads} to {BLOCK_HEADS} heads, not {problem.h_q}")
    return None


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per SM, in clusters that share the queries."""
    clusters = max(1, min(device.sm_count // CLUSTER, problem.s_q))
    return (CLUSTER * clusters, 1, 1)


KERNEL = BackwardKernel(
    "sparse_backward_sm90_pair",
    "gradients of sparse attention with WGMMA for 65 to 128 heads: a cluster of two blocks shares a query",
    "sparse_backward/sm90_pair.cu",
    BackwardParams,
    HOPPER,
    VARIANTS,
    CORE,
    facts={"block_heads": BLOCK_HEADS, "cluster": CLUSTER},
    unsupported=unsupported,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
    dkv_order=DkvOrder.SM90,
)
