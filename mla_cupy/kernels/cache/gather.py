"""Host side of `cache/gather.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import CacheGatherParams
from mla_cupy.kernels.spec import KernelSpec

ROWS_PER_BLOCK = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_gather",
    "reads tokens of a paged cache as rows of numbers",
    "cache/gather.cu",
    CacheGatherParams,
    facts={"rows_per_block": ROWS_PER_BLOCK},
)
