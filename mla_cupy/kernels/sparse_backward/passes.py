"""The kernels before and after the main one: statistics of the queries, the gradients in their own dtypes."""

from __future__ import annotations

from mla_cupy.kernels.numbers import to_log2
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.params import DeltaParams, DkvParams, DlseParams, SinkParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.sparse_backward.problem import DkvOrder, SparseBackwardProblem
from mla_cupy.kernels.spec import DTYPE_VARIANTS, PLAIN, KernelSpec, Variant

UNITS_PER_BLOCK = 8
SPAN_QUERIES = 8
"""Queries of one head that a warp adds up for the gradient of the sink."""

DELTA: KernelSpec[object] = KernelSpec(
    "sparse_backward_delta",
    "the statistics of each query and head: sum(out * dout), and the log-sum-exp with the sink",
    "sparse_backward/delta.cu",
    DeltaParams,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"units_per_block": UNITS_PER_BLOCK, "span_queries": SPAN_QUERIES},
)


def spans(s_q: int) -> int:
    """Number of partial sums of each head's sink."""
    return -(-s_q // SPAN_QUERIES)


def launch_delta(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write `delta`, `lse2` and, with a sink, its partial sums to the workspace."""
    params = DeltaParams(
        out="out",
        dout="dout",
        lse="lse",
        attn_sink=call.name("attn_sink"),
        counts="counts",
        delta="delta",
        lse2="lse2",
        sink_sums="sink_sums" if problem.has_sink else NULL,
        out_stride_s_h_elems=call.strides("out", 2),
        dout_stride_s_h_elems=call.strides("dout", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        attn_sink_stride_elems=call.stride("attn_sink"),
        s_q=problem.s_q,
        h_q=problem.h_q,
        out_is_fp32=call.view("out").dtype == "float32",
        lse_to_log2=to_log2(call.options.lse_base),
    )
    blocks = -(-spans(problem.s_q) * problem.h_q // UNITS_PER_BLOCK)
    return Launch(DELTA, Variant(dtype=problem.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)


DLSE_THREADS = 256

DLSE: KernelSpec[object] = KernelSpec(
    "sparse_backward_dlse",
    "adds a gradient with respect to lse to the statistics of each query and head",
    "sparse_backward/dlse.cu",
    DlseParams,
    facts={"pairs_per_block": DLSE_THREADS},
)


def launch_dlse(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Change `delta` so that a main kernel computes both gradients from it; for a deterministic call, also bound it."""
    params = DlseParams(
        dlse="dlse",
        lse="lse",
        lse2="lse2",
        delta="delta",
        delta_bounds="delta_bounds" if problem.deterministic else NULL,
        dlse_stride_s_h_elems=call.strides("dlse", 2),
        lse_stride_s_h_elems=call.strides("lse", 2),
        s_q=problem.s_q,
        h_q=problem.h_q,
        lse_to_log2=to_log2(call.options.lse_base),
    )
    blocks = -(-problem.s_q * problem.h_q // DLSE_THREADS)
    return Launch(DLSE, PLAIN[0], (blocks, 1, 1), LaunchArgs(params), dependent=False)


HEADS_PER_BLOCK = 32


SINK: KernelSpec[object] = KernelSpec(
    "sparse_backward_sink",
    "adds the partial sums up to the gradient of the attention sinks",
    "sparse_backward/sink.cu",
    SinkParams,
    core=PLAIN,
    facts={"heads_per_block": HEADS_PER_BLOCK},
)


def launch_sink(problem: SparseBackwardProblem, call: Call) -> Launch:
    """Write d_sink, (h_q,), contiguous."""
    params = SinkParams(sink_sums="sink_sums", d_sink="d_sink", spans=spans(problem.s_q), h_q=problem.h_q)
    return Launch(SINK, PLAIN[0], (-(-problem.h_q // HEADS_PER_BLOCK), 1, 1), LaunchArgs(params), dependent=False)


DKV_ROWS_PER_BLOCK = 8

DKV: KernelSpec[object] = KernelSpec(
    "sparse_backward_dkv",
    "turns the float32 sums of dkv, in the main kernel's order and bins, into the gradient",
    "sparse_backward/dkv.cu",
    DkvParams,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    facts={"rows_per_block": DKV_ROWS_PER_BLOCK},
)


def launch_dkv(problem: SparseBackwardProblem, call: Call, num_bins: int, order: DkvOrder) -> Launch:
    """Write dkv."""
    params = DkvParams(
        sums="sums",
        dkv="dkv",
        dkv_stride_s_elems=call.stride("dkv"),
        s_kv=problem.s_kv,
        d_qk=problem.d_qk,
        num_bins=num_bins,
        order=order,
        dkv_is_fp32=call.view("dkv").dtype == "float32",
    )
    blocks = -(-problem.s_kv // DKV_ROWS_PER_BLOCK)
    return Launch(DKV, Variant(dtype=problem.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)


KERNELS = (DELTA, DLSE, SINK, DKV)
