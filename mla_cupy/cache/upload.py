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

from mla_cupy.cache.book import NO_PAGE, Book, Extension
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
        """Where the slots and the positions of so many tokens are."""
        begin = self.pairs - 2 * count
        return slice(begin, begin + count), slice(begin + count, self.pairs)


def pack(words: Array, at: Words, book: Book, plan: Extension, counts: Array | int) -> slice:
    """Write a step of sequences that have been extended by `counts`; returns the words to upload."""
    rows = everything = plan.rows
    if book.changed:
        outside = book.dirty.copy()
        outside[rows] = False
        (others,) = outside.nonzero()
        everything = np.concatenate([rows, others]) if len(others) else rows
    total = len(everything)
    begin = at.pairs - 2 * _pack_tokens(words, at, book, plan, counts)
    if plan.copied:
        pairs = words[at.pairs : at.pairs + 2 * at.max_seqs]
        pairs[:] = NO_PAGE
        pairs[: 2 * len(plan.copied)] = np.asarray(plan.copied, np.int32).reshape(-1)
    words[at.header], words[at.header + 1] = len(rows), total
    lists = words[at.header + HEADER_WORDS : at.changes]
    lists[:total] = everything
    lists[at.max_seqs : at.max_seqs + total] = plan.after if everything is rows else book.length[everything]
    first = lists[2 * at.max_seqs : 2 * at.max_seqs + total + 1]
    changes = words[at.changes :].reshape(-1, 2)
    if book.changed or plan.copied or len(plan.taken) != len(plan.growing):
        made = _pack_changes(changes, first, book, everything)
    else:
        made = _pack_taken(changes, first, plan)
    return slice(begin, at.changes + 2 * made)


def _pack_tokens(words: Array, at: Words, book: Book, plan: Extension, counts: Array | int) -> int:
    """Where the tokens of the step go, sequence after sequence; returns how many there are."""
    rows, owner, positions = plan.rows, plan.rows, plan.before
    if not (isinstance(counts, int) and counts == 1):
        added = plan.after - plan.before
        index = np.repeat(np.arange(len(rows)), added)
        positions = np.arange(len(index)) - (np.cumsum(added) - plan.after)[index]
        owner = rows[index]
    page = positions // book.page_size
    slots, where = at.tokens(len(positions))
    # page_of * page_size + positions % page_size
    words[slots] = (book.table[owner, page] - page) * book.page_size + positions
    words[where] = positions
    return len(positions)


def _pack_taken(changes: Array, first: Array, plan: Extension) -> int:
    """The pages that the step has taken, one for each growing sequence; returns how many."""
    made = len(plan.growing)
    first[0] = 0
    if made:
        np.cumsum(plan.lacks, out=first[1:])
        changes[:made, 0] = plan.owned[plan.growing]
        changes[:made, 1] = plan.taken
    else:
        first[1:] = 0
    return made


def _pack_changes(changes: Array, first: Array, book: Book, rows: Array) -> int:
    """The pages that the device does not know; returns how many."""
    synced = book.synced[rows]
    counts = book.owned[rows] - synced
    first[0] = 0
    np.cumsum(counts, out=first[1:])
    total = int(first[len(rows)])
    if total:
        index = np.repeat(np.arange(len(rows)), counts)
        columns = np.arange(total) - (first[:-1] - synced)[index]
        changes[:total, 0] = columns
        changes[:total, 1] = book.table[rows[index], columns]
    return total


def mark_uploaded(book: Book) -> None:
    """The device knows everything now."""
    np.copyto(book.synced, book.owned)
    if book.changed:
        book.dirty[:] = False
        book.changed = False
