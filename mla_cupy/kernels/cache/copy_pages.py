"""Host side of `cache/copy_pages.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import CacheCopyPagesParams
from mla_cupy.kernels.spec import KernelSpec

PIECE_BYTES = 16384
BLOCKS_PER_SM = 4

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_copy_pages",
    "copies pages within each layer of a pool",
    "cache/copy_pages.cu",
    CacheCopyPagesParams,
    facts={"piece_bytes": PIECE_BYTES},
)
