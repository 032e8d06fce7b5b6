"""Host side of `cache/append.cu`."""

from __future__ import annotations

from mla_cupy.kernels.params import CacheAppendParams
from mla_cupy.kernels.spec import PLAIN, KernelSpec

TOKENS_PER_BLOCK = 8

KERNEL: KernelSpec[object] = KernelSpec(
    "cache_append",
    "quantises tokens and writes them to a paged cache",
    "cache/append.cu",
    CacheAppendParams,
    core=PLAIN,
    facts={"tokens_per_block": TOKENS_PER_BLOCK},
)
