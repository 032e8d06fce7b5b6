"""One step as 32-bit words, for a single upload: what is new in the block table, and where the step's tokens go.

    slots | positions | (source, destination)[max_seqs] | header | rows | lengths | first changes | (column, page)...

Slots and positions end where the pairs begin, so what is uploaded is one piece, as long as the step needs. From the
header on it is what `cache_update` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.book import NO_PAGE, Book
from mla_cupy.records import HEADER_WORDS

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Words:
    """Where everything is among the words.

    Attributes
    ----------
    pairs, header, changes : int
        Where they begin; slots and positions end at `pairs`.
    total : int
    """

    max_seqs: int
    pairs: int
    header: int
    changes: int
    total: int

    @staticmethod
    def of(max_seqs: int, max_pages: int, max_tokens: int) -> Words:
        """For caches of these sizes."""
        pairs = -(-2 * max_tokens // 4) * 4
        header = pairs + -(-2 * max_seqs // 4) * 4
        changes = header + HEADER_WORDS + 3 * max_seqs + 1
        return Words(max_seqs, pairs, header, changes, changes + 2 * max_seqs * max_pages)

    def tokens(self, count: int) -> tuple[slice, slice]:
        """Of the slots and of the positions."""
        begin = self.pairs - 2 * count
        return slice(begin, begin + count), slice(begin + count, self.pairs)


def pack(words: Array, at: Words, book: Book, rows: Array, counts: Array, copied: list[tuple[int, int]]) -> slice:
    """Write a step of sequences that have been extended by `counts`; returns the words to upload."""
    outside = book.dirty.copy()
    outside[rows] = False
    (others,) = np.nonzero(outside)
    everything = np.concatenate([rows, others]) if len(others) else rows
    _pack_tokens(words, at, book, rows, counts)
    pairs = words[at.pairs : at.pairs + 2 * at.max_seqs]
    pairs[:] = NO_PAGE
    if copied:
        pairs[: 2 * len(copied)] = np.asarray(copied, np.int32).reshape(-1)
    words[at.header], words[at.header + 1] = len(rows), len(everything)
    lists, total = words[at.header + HEADER_WORDS : at.changes], len(everything)
    lists[:total] = everything
    lists[at.max_seqs : at.max_seqs + total] = book.length[everything]
    return slice(at.pairs - 2 * int(counts.sum()), _pack_changes(words, lists, at, book, everything))


def _pack_tokens(words: Array, at: Words, book: Book, rows: Array, counts: Array) -> None:
    """Where the tokens of the step go, sequence after sequence."""
    ends = book.length[rows]
    owner: Array
    if len(rows) and (counts == 1).all():
        owner, positions = rows, ends - 1
    else:
        total = int(counts.sum())
        index = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(total) - (np.cumsum(counts) - ends)[index]
        owner = rows[index]
    page, place = np.divmod(positions, book.page_size)
    slots, where = at.tokens(len(positions))
    words[slots] = book.table[owner, page] * book.page_size + place
    words[where] = positions


def _pack_changes(words: Array, lists: Array, at: Words, book: Book, rows: Array) -> int:
    """The pages that the device does not know; returns the end of the upload."""
    synced, owned = book.synced[rows], book.owned[rows]
    counts = np.maximum(owned - synced, 0)
    first = lists[2 * at.max_seqs : 3 * at.max_seqs + 1]
    first[0] = 0
    np.cumsum(counts, out=first[1 : len(rows) + 1])
    total = int(first[len(rows)])
    if total:
        index = np.repeat(np.arange(len(rows)), counts)
        columns = np.arange(total) - (first[: len(rows)] - synced)[index]
        changes = words[at.changes : at.changes + 2 * total].reshape(-1, 2)
        changes[:, 0] = columns
        changes[:, 1] = book.table[rows[index], columns]
    return at.changes + 2 * total


def mark_uploaded(book: Book) -> None:
    """The device knows everything now."""
    np.copyto(book.synced, book.owned)
    book.dirty[:] = False
