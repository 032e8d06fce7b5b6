"""The kernels of a paged cache, one build each."""

from __future__ import annotations

from mla_cupy.cache_formats import HEADER_WORDS
from mla_cupy.kernels.cache import absorb
from mla_cupy.kernels.params import (
    CacheAppendParams,
    CacheCopyPagesParams,
    CacheGatherParams,
    CachePrepareParams,
    CacheSlotsParams,
    CacheUpdateParams,
)
from mla_cupy.kernels.spec import PLAIN, KernelSpec, variants

APPENDED_PER_BLOCK = 8

APPEND: KernelSpec[object] = KernelSpec(
    "cache_append",
    "quantises tokens and writes them to a paged cache",
    "cache/append.cu",
    CacheAppendParams,
    core=PLAIN,
    facts={"tokens_per_block": APPENDED_PER_BLOCK},
)


PREPARED_PER_BLOCK = 8
QUERY_ROWS_PER_BLOCK = 16

PREPARE: KernelSpec[object] = KernelSpec(
    "cache_prepare",
    "turns and quantises queries, and writes tokens to a paged cache",
    "cache/prepare.cu",
    CachePrepareParams,
    variants=variants(codes=(0, 1)),
    facts={"tokens_per_block": PREPARED_PER_BLOCK, "rows_per_block": QUERY_ROWS_PER_BLOCK},
)


GATHERED_PER_BLOCK = 8

GATHER: KernelSpec[object] = KernelSpec(
    "cache_gather",
    "reads tokens of a paged cache as rows of numbers",
    "cache/gather.cu",
    CacheGatherParams,
    facts={"rows_per_block": GATHERED_PER_BLOCK},
)


PIECE_BYTES = 16384
COPY_BLOCKS_PER_SM = 4

COPY_PAGES: KernelSpec[object] = KernelSpec(
    "cache_copy_pages",
    "copies pages within each layer of a pool",
    "cache/copy_pages.cu",
    CacheCopyPagesParams,
    facts={"piece_bytes": PIECE_BYTES},
)


UPDATE: KernelSpec[object] = KernelSpec(
    "cache_update",
    "brings a block table up to date, gathers the rows of a step and places its tokens",
    "cache/update.cu",
    CacheUpdateParams,
    facts={"header_words": HEADER_WORDS},
)


SLOTS_PER_BLOCK = 1024

SLOTS: KernelSpec[object] = KernelSpec(
    "cache_slots",
    "finds the slots of consecutive tokens of sequences",
    "cache/slots.cu",
    CacheSlotsParams,
    core=PLAIN,
    facts={"slots_per_block": SLOTS_PER_BLOCK},
)


KERNELS = (APPEND, PREPARE, absorb.ABSORB, GATHER, COPY_PAGES, UPDATE, SLOTS)
