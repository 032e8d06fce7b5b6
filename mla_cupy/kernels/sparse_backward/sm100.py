"""Host side of `sparse_backward/sm100.cu`, and what the other Blackwell kernel shares with it."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.kernels.attention.gather_maps import heads_map, rows_map
from mla_cupy.kernels.params import BackwardParams
from mla_cupy.kernels.pipeline import Call
from mla_cupy.kernels.sparse_backward.problem import (
    CORE,
    VARIANTS,
    BackwardKernel,
    DkvOrder,
    SparseBackwardProblem,
)
from mla_cupy.kernels.spec import BLACKWELL, Reason, needs_alignment, needs_cc
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.runtime.launching import Dim3
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.shapes import D_V

TILE_KEYS = 32
BLOCK_HEADS = 64


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason why the kernel does not support the problem; None if it does."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per 64 heads of a query."""
    return (problem.s_q * -(-problem.h_q // BLOCK_HEADS), 1, 1)


def maps(problem: SparseBackwardProblem, call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Tensor maps: kv, gathered four rows at a time; q, dout and dq, in boxes of 64 columns x 64 heads."""
    # Without a row nothing is fetched, but a map needs an address.
    kv = "kv" if problem.s_kv > 0 else "dq"
    dtype, d_qk = problem.dtype, problem.d_qk
    sizes = (problem.s_q, problem.h_q)
    return (
        (kv, rows_map(call, "kv", dtype, problem.s_kv, d_qk)),
        ("q", heads_map(call, "q", dtype, (*sizes, d_qk), BLOCK_HEADS)),
        ("dout", heads_map(call, "dout", dtype, (*sizes, D_V), BLOCK_HEADS)),
        ("dq", heads_map(call, "dq", dtype, (*sizes, d_qk), BLOCK_HEADS)),
    )


KERNEL = BackwardKernel(
    "sparse_backward_sm100",
    "gradients of sparse attention with tcgen05, all sums in tensor memory; simulated, not yet run on hardware",
    "sparse_backward/sm100.cu",
    BackwardParams,
    BLACKWELL,
    VARIANTS,
    CORE,
    facts={"block_heads": BLOCK_HEADS, "tile_keys": TILE_KEYS},
    unsupported=unsupported,
    grid=grid,
    heads_per_addition=BLOCK_HEADS,
    dkv_order=DkvOrder.SM100,
    maps=maps,
    unproven=True,
)
WEIGHT_STATIONARY = replace(
    KERNEL,
    name="sparse_backward_sm100_ws",
    about="gradients of sparse attention with weight-stationary tcgen05 products, for comparison; simulated",
    source="sparse_backward/sm100_ws.cu",
    core=(),
    on_request=True,
    dkv_order=DkvOrder.SM90,  # rows of keys come out of tensor memory in Hopper's fragments
)

KERNELS = (KERNEL, WEIGHT_STATIONARY)
