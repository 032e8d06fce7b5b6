"""Host side of `indexer/topk.cu`, a block per row."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cupy.kernels.indexer.problem import MAX_TOPK, TopkProblem
from mla_cupy.kernels.spec import Kernel, Params, Variant

BLOCK_ELEMS = 32768
"""What a block holds in its registers."""

PARAMS = Params(
    logits="u8",
    ks="u8",
    ke="u8",
    block_table="u8",
    indices="u8",
    counts="u8",
    values="u8",
    logits_stride_q_elems="i8",
    ks_stride_elems="i8",
    ke_stride_elems="i8",
    table_stride_b_elems="i8",
    table_stride_page_elems="i8",
    indices_stride_q_elems="i8",
    counts_stride_elems="i8",
    values_stride_q_elems="i8",
    s_q="i4",
    s_kv="i4",
    k="i4",
    rows_per_table="i4",
    max_pages="i4",
    page_size="i4",
    rows_per_ke="i4",
    keep_first="i4",
    keep_last="i4",
    by_value="i4",
    relative="i4",
    logits_are_bf16="i4",
    rows_ahead="i4",
)


@dataclass(frozen=True)
class TopkVariant(Variant):
    """A build for as many blocks per row."""

    cluster_blocks: int


KERNEL: Kernel[TopkProblem] = Kernel(
    "indexer_topk",
    "exact top-k by radix select, a block per row",
    "indexer/topk.cu",
    PARAMS,
    variants=(TopkVariant(1),),
    facts={"max_sorted": MAX_TOPK, "block_elems": BLOCK_ELEMS, "cluster": 1},
)
