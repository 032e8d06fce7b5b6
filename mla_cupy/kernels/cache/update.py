"""Host side of `cache/update.cu`."""

from __future__ import annotations

from mla_cupy.cache_formats import HEADER_WORDS
from mla_cupy.kernels.spec import KernelSpec, ParamLayout

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_update",
    "brings a block table up to date, gathers the rows of a step and places its tokens",
    "cache/update.cu",
    ParamLayout(
        packed="u8",
        table="u8",
        seqlens="u8",
        step_table="u8",
        step_seqlens="u8",
        slots="u8",
        positions="u8",
        table_stride_elems="i8",
        step_table_stride_elems="i8",
        max_rows="i4",
        max_pages="i4",
        page_size="i4",
        changes_at="i4",
        max_changes="i4",
        max_tokens="i4",
    ),
    facts={"header_words": HEADER_WORDS},
)
