"""Host side of `indexer/topk/select.cu`, a block per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkProblem
from mla_cupy.kernels.spec import KernelSpec, ParamLayout, Variant

ITEMS = 32
"""Logits that a thread holds in its registers."""
MAX_THREADS = 1024
BLOCK_ELEMS = ITEMS * MAX_THREADS
"""What a block holds at most."""

PARAMS = ParamLayout(
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
)


@dataclass(frozen=True)
class TopkVariant(Variant):
    """A build for as many blocks per row, of as many threads."""

    cluster_blocks: int
    threads: int = MAX_THREADS


KERNEL: KernelSpec[TopkProblem] = KernelSpec(
    "indexer_topk_select",
    "exact top-k by radix select, a block per row",
    "indexer/topk/select.cu",
    PARAMS,
    variants=(TopkVariant(1), TopkVariant(1, MAX_THREADS // 2)),
    facts={"max_sorted": MAX_TOPK, "items": ITEMS, "cluster": 1},
)


def variant(kernel: KernelSpec[TopkProblem], problem: TopkProblem) -> TopkVariant:
    """The build with the fewest threads that hold a row; for longer rows, the one with the most."""
    variants = cast(tuple[TopkVariant, ...], kernel.variants)
    fits = [v for v in variants if problem.s_kv <= v.cluster_blocks * v.threads * ITEMS]
    return min(fits or variants, key=lambda v: v.threads if fits else -v.threads)
