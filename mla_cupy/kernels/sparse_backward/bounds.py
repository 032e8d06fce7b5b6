"""Launcher of `generic/sparse_bounds.cu`."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.launchers.spec import DTYPE_VARIANTS, KernelSpec, Launch, Params, any_arch, argument_block

PARAMS = Params(
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

SPEC = KernelSpec(
    "sparse_bounds",
    "generic/sparse_bounds.cu",
    variants=DTYPE_VARIANTS,
    core=(),
    supports_arch=any_arch,
    params=PARAMS,
)


class BoundsPointers(NamedTuple):
    """Addresses and strides (in elements) in the order of the record."""

    q: int
    dout: int
    lse2: int
    delta: int
    rows: int
    counts: int
    norms: int
    largest: int
    q_strides: tuple[int, ...]  # of the query and the head
    dout_strides: tuple[int, ...]
    rows_stride: int


def launch(kernel: Launch, pointers: BoundsPointers, sizes: tuple[int, int, int], scale: float, stream: int) -> None:
    """Write the largest bound. `sizes` is (s_q, h_q, d_qk)."""
    args = argument_block(PARAMS.size)
    strides = (*pointers.q_strides, *pointers.dout_strides, pointers.rows_stride)
    PARAMS.pack_into(args.views[0], *pointers[:8], *strides, *sizes, scale)
    kernel((sizes[0], 1, 1), args, stream)
