"""Launcher of `generic/sparse_rows.cu`."""

from __future__ import annotations

from typing import NamedTuple

from mla_cupy.launchers.spec import KernelSpec, Launch, Params, Variant, any_arch, argument_block

ROWS_PER_TILE = 64
"""The lists are padded to whole tiles."""
MOST_BLOCKS = 1 << 16
"""Blocks take the queries in turn; a grid of so many keeps any GPU busy to the end."""

PARAMS = Params(
    indices="u8",
    topk_length="u8",
    cu_seqlens_q="u8",
    cu_seqlens_kv="u8",
    rows="u8",
    counts="u8",
    selected="u8",
    indices_stride_s_elems="i8",
    indices_stride_k_elems="i8",
    topk_length_stride_elems="i8",
    cu_seqlens_q_stride_elems="i8",
    cu_seqlens_kv_stride_elems="i8",
    rows_stride_elems="i8",
    s_q="i4",
    s_kv="i4",
    topk="i4",
    b="i4",
    causal="i4",
    ordered="i4",
)

SPEC = KernelSpec(
    "sparse_rows",
    "generic/sparse_rows.cu",
    variants=(Variant(),),
    core=(Variant(),),
    supports_arch=any_arch,
    params=PARAMS,
)


class SparseSelection(NamedTuple):
    """What says which rows each query attends to: addresses (0 for what is not given), strides in elements, sizes."""

    indices: int
    topk_length: int
    cu_seqlens_q: int
    cu_seqlens_kv: int
    indices_strides: tuple[int, ...]  # query, slot
    topk_length_stride: int
    cu_seqlens_q_stride: int
    cu_seqlens_kv_stride: int
    s_q: int
    s_kv: int
    topk: int
    b: int  # sequences
    causal: bool


def rows_stride(topk: int) -> int:
    """Length of the memory for one list: whole tiles, one at least."""
    return max(1, -(-topk // ROWS_PER_TILE)) * ROWS_PER_TILE


def launch(
    kernel: Launch, selection: SparseSelection, rows: int, counts: int, selected: int, ordered: bool, stream: int
) -> None:
    """Write the lists to `rows`, (s_q, rows_stride(topk)), aligned to 16 bytes, and their lengths to `counts`, (s_q,).

    `selected`, if not 0, is (s_kv,) and zeroed: how many slots select each row is added to it. `ordered` lists are
    sorted by the 256th of kv that a row is in; the others keep the order of the slots.
    """
    args = argument_block(PARAMS.size)
    s = selection
    strides = (*s.indices_strides, s.topk_length_stride, s.cu_seqlens_q_stride, s.cu_seqlens_kv_stride)
    PARAMS.pack_into(
        args.views[0],
        *s[:4],
        rows,
        counts,
        selected,
        *strides,
        rows_stride(s.topk),
        s.s_q,
        s.s_kv,
        s.topk,
        s.b,
        s.causal,
        ordered,
    )
    kernel((min(s.s_q, MOST_BLOCKS), 1, 1), args, stream)
