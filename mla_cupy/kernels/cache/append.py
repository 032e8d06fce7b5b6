"""Host side of `cache/append.cu`."""

from __future__ import annotations

from mla_cupy.kernels.attention.record_layout import MEMBERS
from mla_cupy.kernels.spec import PLAIN, KernelSpec, ParamLayout

TOKENS_PER_BLOCK = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_append",
    "quantises tokens and writes them to a paged cache",
    "cache/append.cu",
    ParamLayout(
        latent="u8",
        rope="u8",
        cache="u8",
        slots="u8",
        cos="u8",
        sin="u8",
        positions="u8",
        latent_stride_bytes="i8",
        rope_stride_bytes="i8",
        slots_stride_bytes="i8",
        positions_stride_bytes="i8",
        cos_stride_elems="i8",
        sin_stride_elems="i8",
        page_stride_bytes="i8",
        token_stride_bytes="i8",
        n="i4",
        num_pages="i4",
        page_size="i4",
        max_position="i4",
        element="i4",
        slots_are_64="i4",
        positions_are_64="i4",
        interleaved="i4",
        power_of_2="i4",
        **MEMBERS,
    ),
    core=PLAIN,
    facts={"tokens_per_block": TOKENS_PER_BLOCK},
)
