"""Host side of `cache/update.cu`."""

from __future__ import annotations

from mla_cupy.cache_formats import HEADER_WORDS
from mla_cupy.kernels.params import CacheUpdateParams
from mla_cupy.kernels.spec import KernelSpec

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_update",
    "brings a block table up to date, gathers the rows of a step and places its tokens",
    "cache/update.cu",
    CacheUpdateParams,
    facts={"header_words": HEADER_WORDS},
)
