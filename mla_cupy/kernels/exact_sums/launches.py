"""The kernels of order-independent sums: norms of rows, bounds of terms, and the bins that follow from them."""

from __future__ import annotations

from mla_cupy.kernels.attention.row_lists import rows_stride
from mla_cupy.kernels.params import BinsParams, BoundsParams, NormsParams
from mla_cupy.kernels.pipeline import Call, Launch, LaunchArgs
from mla_cupy.kernels.spec import DTYPE_VARIANTS, PLAIN, KernelSpec, Variant

NORMS_PER_BLOCK = 8


NORMS: KernelSpec[object] = KernelSpec(
    "exact_sums_norms",
    "for a deterministic backward: L2 norms of the selected rows",
    "exact_sums/norms.cu",
    NormsParams,
    variants=DTYPE_VARIANTS,
    facts={"rows_per_block": NORMS_PER_BLOCK},
)


def launch_norms(call: Call) -> Launch:
    """Write the norm of the value part of each row of kv that is selected."""
    kv = call.view("kv")
    params = NormsParams(kv="kv", selected="selected", norms="norms", kv_stride_s_elems=kv.strides[0], s_kv=kv.shape[0])
    blocks = -(-kv.shape[0] // NORMS_PER_BLOCK)
    return Launch(NORMS, Variant(dtype=kv.dtype), (blocks, 1, 1), LaunchArgs(params), dependent=False)


BOUNDS: KernelSpec[object] = KernelSpec(
    "exact_sums_bounds",
    "for a deterministic backward: an upper bound of what a query adds to dkv",
    "exact_sums/bounds.cu",
    BoundsParams,
    variants=DTYPE_VARIANTS,
)


def launch_bounds(call: Call, deltas: str = "delta") -> Launch:
    """Write the largest bound of a query's contributions to the workspace's `largest`; P times delta is within
    `deltas`.
    """
    s_q, h_q, d_qk = call.view("q").shape
    dtype, topk = call.view("q").dtype, call.view("indices").shape[1]
    params = BoundsParams(
        q="q",
        dout="dout",
        lse2="lse2",
        delta=deltas,
        rows="rows",
        counts="counts",
        norms="norms",
        largest="largest",
        q_stride_s_h_elems=call.strides("q", 2),
        dout_stride_s_h_elems=call.strides("dout", 2),
        rows_stride_elems=rows_stride(topk),
        s_q=s_q,
        h_q=h_q,
        d_qk=d_qk,
        scale=call.options.scale,
    )
    return Launch(BOUNDS, Variant(dtype=dtype), (s_q, 1, 1), LaunchArgs(params), dependent=False)


BINNED_PER_BLOCK = 256
NUM_BINS = 6
"""Sums of a deterministic backward per element of dkv."""


BINS: KernelSpec[object] = KernelSpec(
    "exact_sums_bins",
    "for a deterministic backward: the extraction constants of its order-independent (binned) sums",
    "exact_sums/bins.cu",
    BinsParams,
    facts={"rows_per_block": BINNED_PER_BLOCK, "num_bins": NUM_BINS},
)


def launch_bins(s_kv: int, additions: int, *, dependent: bool = False) -> Launch:
    """Write the extraction constant of each row, and after them their common bound: (s_kv + 1,)."""
    params = BinsParams(selected="selected", largest="largest", extractors="extractors", s_kv=s_kv, additions=additions)
    return Launch(BINS, PLAIN[0], (s_kv // BINNED_PER_BLOCK + 1, 1, 1), LaunchArgs(params), dependent)


KERNELS = (NORMS, BOUNDS, BINS)
