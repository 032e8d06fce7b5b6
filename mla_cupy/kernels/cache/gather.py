"""Host side of `cache/gather.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.record_layout import MEMBERS
from mla_cupy.kernels.spec import KernelSpec, ParamLayout

ROWS_PER_BLOCK = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_gather",
    "reads tokens of a paged cache as rows of numbers",
    "cache/gather.cu",
    ParamLayout(
        cache="u8",
        slots="u8",
        rows="u8",
        slots_stride_bytes="i8",
        rows_stride_bytes="i8",
        page_stride_bytes="i8",
        token_stride_bytes="i8",
        n="i4",
        num_pages="i4",
        page_size="i4",
        element="i4",
        slots_are_64="i4",
        **MEMBERS,
    ),
    facts={"rows_per_block": ROWS_PER_BLOCK},
)
