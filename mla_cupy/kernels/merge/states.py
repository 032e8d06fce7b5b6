"""Launcher of `generic/merge_states.cu`."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Launch, Params, any_arch, argument_block

ROWS_PER_BLOCK = 4

PARAMS = Params(
    outs="u8",
    lses="u8",
    out="u8",
    lse="u8",
    outs_stride_n_elems="i8",
    outs_stride_b_elems="i8",
    outs_stride_s_elems="i8",
    outs_stride_h_elems="i8",
    lses_stride_n_elems="i8",
    lses_stride_b_elems="i8",
    lses_stride_h_elems="i8",
    lses_stride_s_elems="i8",
    out_stride_b_elems="i8",
    out_stride_s_elems="i8",
    out_stride_h_elems="i8",
    lse_stride_b_elems="i8",
    lse_stride_h_elems="i8",
    lse_stride_s_elems="i8",
    n="i4",
    b="i4",
    s_q="i4",
    h_q="i4",
    d="i4",
    outs_are_fp32="i4",
    out_is_fp32="i4",
    to_log2="f4",
    lse_factor="f4",
    empty_lse="f4",
)

SPEC = KernelSpec(
    "merge_states",
    "generic/merge_states.cu",
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
    supports_arch=any_arch,
    params=PARAMS,
)


class MergePointers(NamedTuple):
    """Addresses and strides (in elements, without the last one of the outs), in the order of the record."""

    outs: int
    lses: int
    out: int
    lse: int
    outs_strides: tuple[int, ...]
    lses_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]


def launch(
    kernel: Launch, pointers: MergePointers, sizes: tuple[int, ...], flags: tuple[float, ...], stream: int
) -> None:
    """Merge. `sizes` is (n, b, s_q, h_q, d); `flags` the rest of the record."""
    args = argument_block(PARAMS.size)
    strides = (*pointers.outs_strides, *pointers.lses_strides, *pointers.out_strides, *pointers.lse_strides)
    PARAMS.pack_into(args.views[0], *pointers[:4], *strides, *sizes, *flags)
    _, b, s_q, h_q, _ = sizes
    kernel((-(-b * s_q * h_q // ROWS_PER_BLOCK), 1, 1), args, stream)
