"""Host side of `cache/copy_pages.cu`."""

from __future__ import annotations

from mla_cupy.kernels.spec import KernelSpec, ParamLayout

PIECE_BYTES = 16384
BLOCKS_PER_SM = 4

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_copy_pages",
    "copies pages within each layer of a pool",
    "cache/copy_pages.cu",
    ParamLayout(
        pool="u8",
        pairs="u8",
        layer_stride_bytes="i8",
        page_stride_bytes="i8",
        pairs_stride_n_elems="i8",
        pairs_stride_elems="i8",
        page_bytes="i8",
        n="i4",
        num_layers="i4",
        num_pages="i4",
        aligned="i4",
    ),
    facts={"piece_bytes": PIECE_BYTES},
)
