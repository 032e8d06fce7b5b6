"""Host side of `exact_sums/bounds.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.row_lists import rows_stride
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, DtypeVariant, KernelSpec, ParamLayout

PARAMS = ParamLayout(
    q="u8",
    dout="u8",
    lse2="u8",
    delta="u8",
    rows="u8",
    counts="u8",
    norms="u8",
    largest="u8",
    q_stride_s_elems="i8",
    q_stride_h_elems="i8",
    dout_stride_s_elems="i8",
    dout_stride_h_elems="i8",
    rows_stride_elems="i8",
    s_q="i4",
    h_q="i4",
    d_qk="i4",
    scale="f4",
)

KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_bounds",
    "for a deterministic backward: an upper bound of what a query adds to dkv",
    "exact_sums/bounds.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write the largest bound to the workspace's `largest`."""
    addresses = ("q", "dout", "lse2", "delta", "rows", "counts", "norms", "largest")
    strides = (*call.strides("q", 2), *call.strides("dout", 2), rows_stride(problem.topk))
    record = LaunchArgs(KERNEL, addresses, (*strides, problem.s_q, problem.h_q, problem.d_qk, call.options.scale))
    return Launch(KERNEL, DtypeVariant(problem.dtype), (problem.s_q, 1, 1), record, dependent=False)
