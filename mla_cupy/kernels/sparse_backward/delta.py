"""Launcher of `generic/sparse_delta.cu`."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Launch, Params, any_arch, argument_block

UNITS_PER_BLOCK = 8
SPAN_QUERIES = 8
"""Queries of one head that a warp adds up for the gradient of the sink."""

PARAMS = Params(
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

SPEC = KernelSpec(
    "sparse_delta",
    "generic/sparse_delta.cu",
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    supports_arch=any_arch,
    params=PARAMS,
)


class DeltaPointers(NamedTuple):
    """Addresses and strides (in elements) in the order of the record; 0 for what is not there."""

    out: int
    dout: int
    lse: int
    attn_sink: int
    counts: int
    delta: int
    lse2: int
    sink_sums: int
    out_strides: tuple[int, ...]  # of the query and the head
    dout_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    attn_sink_stride: int


def spans(s_q: int) -> int:
    """How many partial sums each head's sink has."""
    return -(-s_q // SPAN_QUERIES)


def launch(kernel: Launch, pointers: DeltaPointers, s_q: int, h_q: int, flags: tuple[float, ...], stream: int) -> None:
    """Write delta, lse2 and, with a sink, its partial sums. `flags` is the record from `out_is_fp32` on."""
    args = argument_block(PARAMS.size)
    strides = (*pointers.out_strides, *pointers.dout_strides, *pointers.lse_strides, pointers.attn_sink_stride)
    PARAMS.pack_into(args.views[0], *pointers[:8], *strides, s_q, h_q, *flags)
    kernel((-(-spans(s_q) * h_q // UNITS_PER_BLOCK), 1, 1), args, stream)
