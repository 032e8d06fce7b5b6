"""Host side of `sparse_backward/mma.cu`: gradients on every GPU since Ampere."""

from __future__ import annotations

from mla_cupy.kernels.attention.mma import SMEM_KB, is_default, runs_on, smem_kb
from mla_cupy.kernels.params import BackwardParams
from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
    plain_variant,
)
from mla_cupy.kernels.spec import SINCE_AMPERE, Reason, Variant, needs_alignment, needs_ampere
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

BLOCK_HEADS = 32


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if reason := needs_ampere(device):
        return reason
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per query and 32 heads."""
    return (problem.s_q * -(-problem.h_q // BLOCK_HEADS), 1, 1)


def variant(problem: SparseBackwardProblem, device: DeviceInfo) -> Variant:
    """The build for a problem."""
    return plain_variant(problem, device).extended(smem_kb=smem_kb(device))


def _in_both_sizes(builds: tuple[Variant, ...]) -> tuple[Variant, ...]:
    return tuple(build.extended(smem_kb=kb) for kb in SMEM_KB for build in builds)


KERNEL = BackwardKernel(
    "sparse_backward_mma",
    "gradients of sparse attention with mma.sync, 32 heads of a query at a time",
    "sparse_backward/mma.cu",
    BackwardParams,
    SINCE_AMPERE,
    _in_both_sizes(VARIANTS),
    _in_both_sizes(CORE),
    runs_on=runs_on,
    is_default=is_default,
    facts={"block_heads": BLOCK_HEADS},
    unsupported=unsupported,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
    dkv_order=DkvOrder.SM90,
    variant=variant,
)
