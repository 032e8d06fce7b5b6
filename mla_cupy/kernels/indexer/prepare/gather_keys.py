"""Host side of `indexer/prepare/gather_keys.cu`."""

from __future__ import annotations

from mla_cupy.kernels.spec import KernelSpec, ParamLayout

KEYS_PER_BLOCK = 16

KERNEL: KernelSpec[object] = KernelSpec(
    "indexer_prepare_gather_keys",
    "reads index keys of a paged cache",
    "indexer/prepare/gather_keys.cu",
    ParamLayout(
        cache="u8",
        slots="u8",
        codes="u8",
        k_scale="u8",
        slots_stride_bytes="i8",
        page_stride_bytes="i8",
        codes_stride_elems="i8",
        k_scale_stride_elems="i8",
        n="i4",
        num_pages="i4",
        page_size="i4",
        d="i4",
        slots_are_64="i4",
    ),
    facts={"keys_per_block": KEYS_PER_BLOCK},
)
