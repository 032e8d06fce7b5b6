"""Host side of `sparse_backward/delta.cu`."""

from __future__ import annotations

from mla_cupy.kernels.numbers import to_log2
from mla_cupy.kernels.pipeline import NULL, Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, DtypeVariant, KernelSpec, ParamLayout

UNITS_PER_BLOCK = 8
SPAN_QUERIES = 8
"""Queries of one head that a warp adds up for the gradient of the sink."""

PARAMS = ParamLayout(
    out="u8",
    dout="u8",
    lse="u8",
    attn_sink="u8",
    counts="u8",
    delta="u8",
    lse2="u8",
    sink_sums="u8",
    out_stride_s_elems="i8",
    out_stride_h_elems="i8",
    dout_stride_s_elems="i8",
    dout_stride_h_elems="i8",
    lse_stride_s_elems="i8",
    lse_stride_h_elems="i8",
    attn_sink_stride_elems="i8",
    s_q="i4",
    h_q="i4",
    out_is_fp32="i4",
    lse_to_log2="f4",
)

KERNEL: KernelSpec[object] = KernelSpec(
    "sparse_backward_delta",
    "the statistics of each query and head: sum(out * dout), and the log-sum-exp with the sink",
    "sparse_backward/delta.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"units_per_block": UNITS_PER_BLOCK, "span_queries": SPAN_QUERIES},
)


def spans(s_q: int) -> int:
    """How many partial sums each head's sink has."""
    return -(-s_q // SPAN_QUERIES)


def launch(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write `delta`, `lse2` and, with a sink, its partial sums to the workspace."""
    sink_sums = "sink_sums" if problem.has_sink else NULL
    addresses = ("out", "dout", "lse", call.name("attn_sink"), "counts", "delta", "lse2", sink_sums)
    values = (
        *call.strides("out", 2),
        *call.strides("dout", 2),
        *call.strides("lse", 2),
        *call.strides("attn_sink", 1),
        *(problem.s_q, problem.h_q, call.view("out").dtype == "float32", to_log2(call.options.lse_base)),
    )
    blocks = -(-spans(problem.s_q) * problem.h_q // UNITS_PER_BLOCK)
    record = LaunchArgs(KERNEL, addresses, values)
    return Launch(KERNEL, DtypeVariant(problem.dtype), (blocks, 1, 1), record, dependent=False)
