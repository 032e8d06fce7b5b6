"""Results of a cache: the arrays of a step, and how its pages are used."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

#: Steps of all caches are numbered together, so that one cache's step is not taken for another's.
next_number = itertools.count(1).__next__


@dataclass(frozen=True)
class CacheStep:
    """Arguments for the calls of one step. The arrays belong to the cache: the next step overwrites them.

    Attributes
    ----------
    slots : array, (n,), int32
        Slots of the step's tokens, one sequence after another, for `cache_append`.
    positions : array, (n,), int32
        Positions of the tokens in their sequences, for RoPE.
    block_table : array, (b, max_pages), int32
    seqlens : array, (b,), int32
        Arguments of `mla_decode`, in the order of the sequences. Lengths include the step's tokens. A model may lower
        them on the device for its own calls; report rejected tokens to the cache with `truncate`.
    copies : int
        Pages that were copied because sequences shared them.
    number : int
        Serial number, larger for later steps. `append` and `append_keys` accept only the cache's newest step.
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
        Live sequences, and their tokens; a token that several sequences share counts once for each.
    pages_used, pages_cached, pages_free : int
        Pages of live sequences; pages of freed sequences, kept for prefix reuse and evicted on demand; empty pages.
    pages_shared, pages_reserved : int
        Used pages that several sequences share; used pages that hold no token yet.
    tokens_wasted : int
        Token positions of used pages that hold no token; for a shared page, positions that none of its sequences has
        filled.
    copies, evictions : int
        Number of pages copied on a write, and of cached pages evicted, so far.
    prefix_hits, prefix_lookups : int
        Number of pages found by hash, and of lookups, so far.
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
