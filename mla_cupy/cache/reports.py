"""Results of a cache: the arrays of a step, and how its pages are used."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

#: Steps of all caches are numbered together, so that one cache's step is not taken for another's.
next_number = itertools.count(1).__next__


@dataclass(frozen=True)
class CacheStep:
    """Arguments of the calls of one step. Its arrays are those of the cache: the next step overwrites them.

    Attributes
    ----------
    slots : array, (n,), int32
        Slots of the step's tokens, sequence after sequence, for `cache_append`.
    positions : array, (n,), int32
        Their positions in their sequences, for RoPE.
    block_table : array, (b, max_pages), int32
    seqlens : array, (b,), int32
        For `mla_decode`, in the order of the sequences. Lengths include the step's tokens. A model may lower them on
        the device for its own calls; the cache learns of rejected tokens by `truncate`.
    copies : int
        Pages that were copied because sequences shared them.
    number : int
        Later steps have larger ones. `append` and `append_keys` refuse a step that is not its cache's newest.
    """

    slots: Any
    positions: Any
    block_table: Any
    seqlens: Any
    copies: int
    number: int


def numbered(step: CacheStep, number: int) -> CacheStep:
    """A step over the same arrays."""
    made = object.__new__(CacheStep)  # a quarter of the time that __init__ takes
    attributes = made.__dict__
    attributes.update(step.__dict__)
    attributes["number"] = number
    return made


@dataclass(frozen=True)
class CacheStats:
    """Statistics of the pages of a cache.

    Attributes
    ----------
    sequences, tokens : int
        Alive, and held by them; a shared token counts for each.
    pages_used, pages_cached, pages_free : int
        Pages of sequences; unreferenced pages kept for prefix reuse, evicted on demand; empty ones.
    pages_shared, pages_reserved : int
        Of those used: by several sequences; beyond the tokens.
    tokens_wasted : int
        Places in used pages that hold no token; in a page of several sequences, those that none of them has filled.
    copies, evictions : int
        Pages copied on a write, and cached pages evicted, so far.
    prefix_hits, prefix_lookups : int
        Pages found, and pages looked for, by hash, so far.
    """

    sequences: int
    tokens: int
    pages_used: int
    pages_cached: int
    pages_free: int
    pages_shared: int
    pages_reserved: int
    tokens_wasted: int
    copies: int
    evictions: int
    prefix_hits: int
    prefix_lookups: int
