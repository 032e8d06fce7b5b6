"""Host side of `sparse_backward/sm100.cu`, and what the other Blackwell kernel shares with it."""

from __future__ import annotations

from dataclasses import replace

from mla_cupy.dtypes import TABLE
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
_BOX_COLUMNS = 64


def unsupported(problem: SparseBackwardProblem, device: DeviceInfo) -> Reason | None:
    """Reason that the kernel cannot take the problem; None if it can."""
    if device.arch not in BLACKWELL:
        return needs_cc(device, "10.0", "10.3")
    return None if problem.aligned else needs_alignment("q, kv, dout and dq")


def grid(problem: SparseBackwardProblem, device: DeviceInfo) -> Dim3:
    """One block per 64 heads of a query."""
    return (problem.s_q * -(-problem.h_q // BLOCK_HEADS), 1, 1)


def maps(problem: SparseBackwardProblem, call: Call) -> tuple[tuple[str, TensorMapSpec], ...]:
    """Tensor maps: kv, whose rows are gathered four at a time; q, dout and dq, in boxes of 64 columns x 64 heads."""
    # Without a row nothing is fetched, but a map needs an address.
    kv = "kv" if problem.s_kv > 0 else "dq"
    nbytes = TABLE[problem.dtype].nbytes
    row_bytes = nbytes * (call.stride("kv") if problem.s_kv > 1 else problem.d_qk)
    rows = TensorMapSpec(
        problem.dtype,
        0,
        dims=(problem.d_qk, max(1, problem.s_kv)),
        strides_bytes=(row_bytes,),
        box=(_BOX_COLUMNS, 1),
    )
    return (
        (kv, rows),
        ("q", _heads_map(problem, call, "q", problem.d_qk)),
        ("dout", _heads_map(problem, call, "dout", D_V)),
        ("dq", _heads_map(problem, call, "dq", problem.d_qk)),
    )


def _heads_map(problem: SparseBackwardProblem, call: Call, name: str, columns: int) -> TensorMapSpec:
    """(s_q, h_q, columns); strides of axes of size 1 mean nothing, and may be what the driver refuses."""
    nbytes = TABLE[problem.dtype].nbytes
    query, head = (nbytes * stride for stride in call.strides(name, 2))
    row_bytes = nbytes * columns
    return TensorMapSpec(
        problem.dtype,
        0,
        dims=(columns, problem.h_q, problem.s_q),
        strides_bytes=(head if problem.h_q > 1 else row_bytes, query if problem.s_q > 1 else row_bytes),
        box=(_BOX_COLUMNS, BLOCK_HEADS, 1),
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
