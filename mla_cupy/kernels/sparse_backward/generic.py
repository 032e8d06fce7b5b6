"""Host side of `sparse_backward/generic.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention import generic as attention_generic
from mla_cupy.kernels.params import BackwardParams
from mla_cupy.kernels.sparse_backward.problem import CORE, VARIANTS, BackwardKernel, SparseBackwardProblem
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3

BLOCK_HEADS = 8


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per query and 8 heads."""
    return (problem.s_q * -(-problem.h_q // BLOCK_HEADS), 1, 1)


KERNEL = BackwardKernel(
    "sparse_backward_generic",
    "gradients of sparse attention on CUDA cores, for any GPU from sm_75 on: the fallback",
    "sparse_backward/generic.cu",
    BackwardParams,
    variants=VARIANTS,
    core=CORE,
    facts={"block_heads": BLOCK_HEADS},
    unsupported=attention_generic.unsupported,
    fallback=True,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
)
