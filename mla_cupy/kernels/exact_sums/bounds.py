"""Host side of `exact_sums/bounds.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.row_lists import rows_stride
from mla_cupy.kernels.params import BoundsParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, Variant

KERNEL: KernelSpec[object] = KernelSpec(
    "exact_sums_bounds",
    "for a deterministic backward: an upper bound of what a query adds to dkv",
    "exact_sums/bounds.cu",
    BoundsParams,
    variants=DTYPE_VARIANTS,
)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write the largest bound to the workspace's `largest`."""
    params = BoundsParams(
        q="q",
        dout="dout",
        lse2="lse2",
        delta="delta",
        rows="rows",
        counts="counts",
        norms="norms",
        largest="largest",
        q_stride_s_h_elems=call.strides("q", 2),
        dout_stride_s_h_elems=call.strides("dout", 2),
        rows_stride_elems=rows_stride(problem.topk),
        s_q=problem.s_q,
        h_q=problem.h_q,
        d_qk=problem.d_qk,
        scale=call.options.scale,
    )
    return Launch(KERNEL, Variant(dtype=problem.dtype), (problem.s_q, 1, 1), LaunchArgs(params), dependent=False)
