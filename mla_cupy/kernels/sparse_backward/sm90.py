"""Host side of `sparse_backward/sm90.cu`."""

from __future__ import annotations

from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    PARAMS,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
)
from mla_cupy.kernels.spec import HOPPER, Reason, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.driver import Dim3

BLOCK_HEADS = 64


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Why the kernel cannot take the problem; None if it can."""
    if device.arch not in HOPPER:
        return needs_cc(device, "9.0")
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per SM; the blocks share the items, each of 64 heads of a query."""
    items = problem.s_q * -(-problem.h_q // BLOCK_HEADS)
    return (max(1, min(device.sm_count, items)), 1, 1)


KERNEL = BackwardKernel(
    "sparse_backward_sm90",
    "gradients of sparse attention with WGMMA, 64 heads of a query at a time",
    "sparse_backward/sm90.cu",
    PARAMS,
    HOPPER,
    VARIANTS,
    CORE,
    facts={"block_heads": BLOCK_HEADS},
    unsupported=unsupported,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
    dkv_order=DkvOrder.SM90,
)
