"""What the kernels of dense decode share on the host: the problem's numbers and the parameter record."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.launchers.spec import Params, Variant

HEAD_DIM_QK = 576
HEAD_DIM_V = 512
MAX_PARTS = 256
"""Of a schedule: the combine kernel gives each part a thread."""

PARAMS = Params(
    q="u8",
    kv="u8",
    block_table="u8",
    seqlens="u8",
    schedule="u8",
    out="u8",
    lse="u8",
    attn_sink="u8",
    max_logits="u8",
    partial_out="u8",
    partial_lse="u8",
    partial_max="u8",
    q_stride_b_elems="i8",
    q_stride_s_elems="i8",
    q_stride_h_elems="i8",
    kv_stride_page_elems="i8",
    kv_stride_token_elems="i8",
    kv_stride_h_elems="i8",
    table_stride_b_elems="i8",
    table_stride_page_elems="i8",
    seqlens_stride_elems="i8",
    out_stride_b_elems="i8",
    out_stride_s_elems="i8",
    out_stride_h_elems="i8",
    lse_stride_b_elems="i8",
    lse_stride_h_elems="i8",
    lse_stride_s_elems="i8",
    max_stride_b_elems="i8",
    max_stride_h_elems="i8",
    max_stride_s_elems="i8",
    sink_stride_elems="i8",
    b="i4",
    s_q="i4",
    h_q="i4",
    h_kv="i4",
    num_pages="i4",
    page_size="i4",
    max_pages="i4",
    num_parts="i4",
    causal="i4",
    out_is_fp32="i4",
    scale_log2="f4",
    lse_factor="f4",
    empty_lse="f4",
)


@dataclass(frozen=True)
class DecodeProblem:
    """What decides which kernels run and how: no pointers, no device.

    `aligned` says that q and the cache start at, and step by, multiples of 16 bytes, which TMA demands.
    """

    s_q: int
    h_q: int
    h_kv: int
    dtype: str
    aligned: bool = True

    @property
    def rows(self) -> int:
        """Query rows of one KV head."""
        return self.s_q * self.h_q // self.h_kv


@dataclass(frozen=True)
class DecodeGeometry:
    """How a kernel cuts a problem: `row_blocks` blocks side by side (all KV heads), each in `num_parts` parts."""

    row_blocks: int
    num_parts: int


@dataclass(frozen=True)
class HeadDimVariant(Variant):
    """A kernel that is compiled for each width of the keys, too."""

    dtype: str
    head_dim_qk: int


def cut(rows: int, block_m: int, resident_blocks: int, h_kv: int = 1) -> DecodeGeometry:
    """As many parts as keep every block of the grid resident at once; `rows` are those of one KV head."""
    row_blocks = h_kv * -(-rows // block_m)
    return DecodeGeometry(row_blocks, min(MAX_PARTS, max(1, resident_blocks // row_blocks)))
