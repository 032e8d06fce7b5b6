"""Host side of `sparse_backward/mma.cu`: gradients on every GPU since Ampere."""

from __future__ import annotations

from functools import partial

from mla_cupy.kernels.attention.mma import LEAST_KB, MORE_KB, archs, chosen_archs, lacks
from mla_cupy.kernels.params import BackwardParams
from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
    plain_variant,
)
from mla_cupy.kernels.spec import Reason, Variant, needs_alignment
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

BLOCK_HEADS = 32


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo, smem_kb: int) -> Reason | None:
    """Reason that a kernel cannot take the problem; None if it can."""
    if reason := lacks(device, smem_kb):
        return reason
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per query and 32 heads."""
    return (problem.s_q * -(-problem.h_q // BLOCK_HEADS), 1, 1)


def variant(problem: SparseBackwardProblem, device: DeviceInfo, smem_kb: int) -> Variant:
    """The build that a problem takes."""
    return plain_variant(problem, device).extended(smem_kb=smem_kb)


def _kernel(name: str, smem_kb: int) -> BackwardKernel:
    return BackwardKernel(
        name,
        f"gradients of sparse attention with mma.sync, 32 heads of a query at a time, in {smem_kb} KB per block",
        "sparse_backward/mma.cu",
        BackwardParams,
        archs(smem_kb),
        variants=tuple(build.extended(smem_kb=smem_kb) for build in VARIANTS),
        core=tuple(build.extended(smem_kb=smem_kb) for build in CORE),
        core_archs=chosen_archs(smem_kb),
        facts={"block_heads": BLOCK_HEADS},
        unsupported=partial(unsupported, smem_kb=smem_kb),
        grid=grid,
        heads_per_addition=BLOCK_HEADS,
        dkv_order=DkvOrder.SM90,
        variant=partial(variant, smem_kb=smem_kb),
        base="sparse_backward_mma",
    )


KERNELS = (_kernel("sparse_backward_mma_163kb", MORE_KB), _kernel("sparse_backward_mma", LEAST_KB))
"""Kernels with mma.sync, the faster one first."""
