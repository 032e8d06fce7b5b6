"""Host side of `merge/states.cu`."""

from __future__ import annotations

from mla_cupy.kernels.spec import DTYPE_VARIANTS, KernelSpec, ParamLayout

PARAMS = ParamLayout(
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

KERNEL: KernelSpec[object] = KernelSpec(
    "merge_states",
    "merges partial results over disjoint sets of keys",
    "merge/states.cu",
    PARAMS,
    variants=DTYPE_VARIANTS,
    core=DTYPE_VARIANTS,
)
