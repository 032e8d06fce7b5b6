"""One step as 32-bit words, for a single upload: changes of the block table, and the number of new tokens of each row.

    (source, destination)[max_seqs] | header | rows | lengths | first changes | first tokens | (column, page)...

The words from the header on are the argument of `cache_update`. The pairs are uploaded if pages are copied; changes
come last, so that the upload is one piece, as long as the step needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.book import NO_PAGE, Book, Extension
from mla_cupy.cache_formats import HEADER_WORDS, words_before_changes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Words:
    """Offsets of the parts among the words.

    Attributes
    ----------
    header, changes : int
        Where they begin; the pairs are the first.
    total : int
    """

    max_seqs: int
    header: int
    changes: int
    total: int

    @staticmethod
    def of(max_seqs: int, max_pages: int) -> Words:
        """Layout for caches of these sizes."""
        header = -(-2 * max_seqs // 4) * 4
        changes = header + words_before_changes(max_seqs)
        return Words(max_seqs, header, changes, changes + 2 * max_seqs * max_pages)

    def sheet(self, words: Array) -> Sheet:
        """The parts of a fresh buffer. The lists of first changes and tokens begin with 0, which stays."""
        words[: self.changes] = 0
        most, lists = self.max_seqs, words[self.header + HEADER_WORDS : self.changes]
        return Sheet(
            *(words[: 2 * most], words[self.header : self.header + HEADER_WORDS]),
            *(lists[:most], lists[most : 2 * most], lists[2 * most : 3 * most + 1], lists[3 * most + 1 :]),
            *(words[self.changes :: 2], words[self.changes + 1 :: 2]),
        )


@dataclass(slots=True)
class Sheet:
    """The parts of the words, as separate arrays.

    `rows_of` are the rows that `rows` and `first_tokens` hold, if they belong to a step of one token each.
    """

    pairs: Array
    header: Array
    rows: Array
    lengths: Array
    first_changes: Array
    first_tokens: Array
    columns: Array
    pages: Array
    rows_of: Array | None = None


def pack(sheet: Sheet, at: Words, book: Book, plan: Extension, counts: Array | int) -> tuple[slice, Array]:
    """Write a step of sequences that have been extended by `counts`.

    Returns
    -------
    slice
        The words to upload.
    array
        The rows that they are about: the step's, and those that the device does not know.
    """
    rows = everything = plan.rows
    if book.changed:
        outside = book.dirty.copy()
        outside[rows] = False
        (others,) = outside.nonzero()
        everything = np.concatenate([rows, others]) if len(others) else rows
    total = len(everything)
    if plan.copied:
        sheet.pairs.fill(NO_PAGE)
        sheet.pairs[: 2 * len(plan.copied)] = np.asarray(plan.copied, np.int32).reshape(-1)
    sheet.lengths[:total] = plan.after if everything is rows else book.length[everything]
    one = isinstance(counts, int) and counts == 1
    if not (one and sheet.rows_of is everything):  # a decode loop extends the same sequences again and again
        sheet.rows_of = None
        sheet.header[0], sheet.header[1] = len(rows), total
        sheet.rows[:total] = everything
        _pack_counts(sheet.first_tokens[1 : len(rows) + 1], book, counts)
        sheet.rows_of = everything if one else None
    if book.changed or plan.copied or plan.total != len(plan.growing):
        made = _pack_changes(sheet, book, everything)
    else:
        made = _pack_taken(sheet, plan)
    return slice(0 if plan.copied else at.header, at.changes + 2 * made), everything


def _pack_counts(ends: Array, book: Book, counts: Array | int) -> None:
    if isinstance(counts, int):
        ordinals = book.ordinals[: len(ends)]
        ends[:] = ordinals if counts == 1 else ordinals * counts
    else:
        np.cumsum(counts, out=ends)


def _pack_taken(sheet: Sheet, plan: Extension) -> int:
    """Pack the step's new pages, one for each growing sequence; returns their number."""
    made = len(plan.growing)
    counts = sheet.first_changes[1 : len(plan.rows) + 1]
    counts[:] = plan.lacks
    if made:
        np.add.accumulate(counts, out=counts)  # without a conversion: a third of the time
        sheet.columns[:made] = plan.first
        sheet.pages[:made] = plan.taken
    return made


def _pack_changes(sheet: Sheet, book: Book, rows: Array) -> int:
    """Pack the pages that the device does not know; returns their number."""
    first = sheet.first_changes[: len(rows) + 1]
    synced = book.synced[rows]
    counts = book.owned[rows] - synced
    np.cumsum(counts, out=first[1:])
    total = int(first[len(rows)])
    if total:
        index = np.repeat(np.arange(len(rows)), counts)
        columns = np.arange(total) - (first[:-1] - synced)[index]
        sheet.columns[:total] = columns
        sheet.pages[:total] = book.table[rows[index], columns]
    return total


def mark_uploaded(book: Book, plan: Extension, rows: Array) -> None:
    """The device knows the rows that have been packed."""
    if book.changed:
        book.synced[rows] = book.owned.take(rows)
        book.dirty[rows] = False
        book.changed = False
    elif plan.total or plan.copied:
        np.copyto(book.synced, book.owned)  # all other rows are equal already: faster than to pick
