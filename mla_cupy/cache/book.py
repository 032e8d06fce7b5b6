"""Bookkeeping of `PagedKVCache`, on the host, in NumPy: the owners of pages.

A `plan_*` checks everything that can fail before anything changes. A sequence may write to a page if no other sequence
shares it and it cannot be found by its hash; else the page is copied, or its hash forgotten, first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache.arguments import whole_numbers
from mla_cupy.cache.prefixes import Digest, Prefixes
from mla_cupy.errors import ArgumentError, CacheFullError, explain
from mla_cupy.ops.checks import is_integer

Array = npt.NDArray[Any]
NO_PAGE = -1
_NO_LISTS = (bytes, bytearray, set, frozenset, dict)
"""Rejected types: `array` would read their bytes as numbers, or they have no order."""
_NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class Extension:
    """Changes that an extension of sequences makes, and their undoing.

    Attributes
    ----------
    rows : array, (b,)
    before, after : array, (b,)
        Lengths.
    owned : array, (b,)
        Pages before.
    lacks : array, (b,), bool
        Whether a sequence needs new pages.
    growing : array, (n,)
        Rows of these sequences.
    first, end : array, (n,)
        First and last columns of their new pages in the table.
    total : int
        Total number of new pages.
    longest : int
        Largest length of a sequence afterwards.
    copies : list of (row, column)
        Pages to copy, since other sequences share them.
    copied : list of (int, int)
        (source, destination), after the extension.
    taken : array, (m,)
        The new pages of the growing sequences, one after the other, after the extension.
    """

    rows: Array
    before: Array
    after: Array
    owned: Array
    lacks: Array
    growing: Array
    first: Array
    end: Array
    total: int
    longest: int
    copies: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    taken: Array


class Book:
    """Pages, their owners, and the block table.

    Attributes
    ----------
    table : array, (max_seqs, max_pages), int32
    ordinals : array, (max_seqs,)
        1, 2, 3 ...
    length, owned, synced : array, (max_seqs,)
        Tokens of each sequence; its pages, reserved ones included; leading pages that the device knows.
    dirty : array, (max_seqs,), bool
        Rows with a length or pages that the device does not know.
    changed : bool
        Whether any row is dirty. The device knows every page of all other rows: `synced` is `owned`.
    refs : array, (num_pages,), int32
        Number of sequences that share a page.
    copies, evictions : int
        Counts since the cache was made.
    """

    def __init__(self, num_pages: int, page_size: int, max_seqs: int, max_pages: int) -> None:
        self.num_pages, self.page_size, self.max_seqs, self.max_pages = num_pages, page_size, max_seqs, max_pages
        self.table = np.full((max_seqs, max_pages), NO_PAGE, np.int32)
        self.length, self.owned, self.synced, self.generation = np.zeros((4, max_seqs), np.int64)
        self.active, self.dirty = np.zeros((2, max_seqs), bool)
        self.changed = False
        self.refs = np.zeros(num_pages, np.int32)
        self.prefixes = Prefixes(num_pages, page_size)
        self.ordinals = np.arange(1, max_seqs + 1)
        self.chains: list[list[Digest]] = [[] for _ in range(max_seqs)]
        self.keys: list[bytes] = [b""] * max_seqs
        self.copies = self.evictions = 0
        self._free = np.arange(num_pages)[::-1].copy()  # a stack; as wide as indices are
        self._num_free = num_pages
        self._unused: dict[int, None] = {}  # pages of no sequence that can be found by their hash, the oldest first
        self._rows = list(range(max_seqs))[::-1]
        self._place = np.zeros(max_seqs, np.int64)
        self._more_owners = 0  # of pages, beyond the first one of each
        self._longest = 0  # no sequence is longer, though all may be shorter
        self._asked: tuple[list[int], Array] | None = None  # the latest list of sequences, and their rows

    # ---- Sequences --------------------------------------------------------------------------------------------

    def rows_of(self, handles: Any) -> Array:
        """The rows of sequences.

        Raises
        ------
        ArgumentError
            If one is not alive, or is listed twice.
        """
        if self._asked is not None and type(handles) is list:
            try:
                if handles == self._asked[0]:
                    return self._asked[1]
            except Exception:  # of elements that cannot be compared, such as arrays
                pass
        given = _handles(handles)
        rows = given % self.max_seqs
        bad = (given < 0) | (given // self.max_seqs != self.generation[rows]) | ~self.active[rows]
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise self._dead(f"sequences[{at}]", int(given[at]))
        order = np.arange(len(rows))
        self._place[rows] = order
        if (self._place[rows] != order).any():
            raise ArgumentError(explain("sequences", "one of them twice", "each once"))
        if type(handles) is list:
            self._asked = given.tolist(), rows
        return rows

    def row_of(self, handle: Any) -> int:
        """The row of one sequence; errors as for `rows_of`."""
        if not is_integer(handle):
            raise ArgumentError(explain("sequence", repr(handle), "one that `allocate` or `fork` returned"))
        row = int(handle) % self.max_seqs
        if int(handle) // self.max_seqs != self.generation[row] or not self.active[row]:
            raise self._dead("sequence", int(handle))
        return row

    def _dead(self, argument: str, handle: int) -> ArgumentError:
        generation, row = divmod(handle, self.max_seqs)
        if 0 <= generation < self.generation[row]:
            return ArgumentError(explain(argument, handle, "a live sequence", "it has been freed"))
        return ArgumentError(explain(argument, handle, "one that `allocate` or `fork` returned"))

    def handle(self, row: int) -> int:
        """The caller's number of a sequence; a row gets a new one for each sequence that it holds."""
        return int(self.generation[row]) * self.max_seqs + row

    def check_rows(self, count: int) -> None:
        """Raise CacheFullError if there is no room for `count` more sequences."""
        if count > len(self._rows):
            remedy = "free sequences, or make the cache with a larger max_seqs"
            raise CacheFullError(explain("sequences", f"{count} more", f"at most {len(self._rows)}", remedy))

    def open(self, pages: Sequence[int], length: int, chain: list[Digest], key: bytes) -> int:
        """A new sequence that shares pages; returns its row."""
        row = self._rows.pop()
        self._take_shared(np.asarray(pages, np.int64))
        self.table[row, : len(pages)] = pages
        self.length[row], self.owned[row], self.synced[row] = length, len(pages), 0
        self._longest = max(self._longest, length)
        self.active[row] = self.dirty[row] = self.changed = True
        self._asked = None
        self.chains[row], self.keys[row] = chain, key
        return row

    def close(self, row: int) -> None:
        """Free a sequence."""
        self._drop(row, 0)
        self.length[row] = 0
        self.active[row], self.dirty[row], self.changed = False, True, True
        self._asked = None
        self.generation[row] += 1
        self.chains[row] = []
        self._rows.append(row)

    def fork(self, row: int) -> int:
        """A sequence with the same tokens; pages that are only reserved stay with the original."""
        pages = self.table[row, : self.pages_for(int(self.length[row]))]
        return self.open(pages.tolist(), int(self.length[row]), list(self.chains[row]), self.keys[row])

    def truncate(self, row: int, length: int) -> None:
        """Keep the first `length` tokens, and no reserved page."""
        self._drop(row, self.pages_for(length))
        self.length[row] = length
        self.dirty[row] = self.changed = True
        del self.chains[row][length // self.page_size :]

    def commit(self, row: int, tokens: npt.NDArray[np.int64]) -> None:
        """Make the full pages of a sequence findable."""
        chain = self.chains[row]
        for digest in list(self.prefixes.chain(tokens, self.keys[row], chain)):
            self.prefixes.register(int(self.table[row, len(chain)]), digest)
            chain.append(digest)

    # ---- Extension --------------------------------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """Number of pages for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def plan_extend(self, rows: Array, counts: Array | int) -> Extension:
        """Plan the pages of each sequence for `counts` more tokens.

        Raises
        ------
        CacheFullError
            If there are not enough pages.
        ArgumentError
            If a sequence would be longer than a row of the table.
        """
        before, owned = self.length.take(rows), self.owned.take(rows)
        after = before + counts
        longest = self._longest + (counts if isinstance(counts, int) else int(counts.max(initial=0)))
        if longest > self.max_pages * self.page_size:
            longest = self._longest_of(after)
        one = isinstance(counts, int) and counts == 1
        lacks = (before if one else after - 1) // self.page_size >= owned
        (growing,) = lacks.nonzero()
        total = len(growing)
        first = end = _NONE
        if total:
            first = owned.take(growing)
            if one:
                end = first + 1  # where its pages end, which are full
            else:
                end = (after.take(growing) - 1) // self.page_size + 1
                total = int((end - first).sum())
        copies = self._shared_tails(rows, before, counts) if self._more_owners else []
        if total or copies:
            self._check_pages(total + len(copies))
        return Extension(rows, before, after, owned, lacks, growing, first, end, total, longest, copies, [], _NONE)

    def _longest_of(self, lengths: Array) -> int:
        """The longest of all sequences, and of some that will have these lengths; error as for `plan_extend`."""
        longest, most = int(lengths.max(initial=0)), self.max_pages * self.page_size
        if longest > most:
            at = int(((lengths - 1) // self.page_size).argmax())
            got = f"{lengths[at]} tokens in all"
            raise ArgumentError(explain(f"counts[{at}]", got, f"at most {most} per sequence: max_pages * page_size"))
        return max(longest, int(self.length.max()))

    def extend(self, plan: Extension) -> None:
        """Allocate the pages and set the lengths."""
        if plan.total or plan.copies:
            taken = self._take(plan.total + len(plan.copies))
            if plan.copies:
                self._copy(plan, taken[: len(plan.copies)].tolist())
            plan.taken = taken[len(plan.copies) :]
        if plan.total:
            self._write_taken(plan)
        self.length[plan.rows] = plan.after
        self._longest = plan.longest

    def _copy(self, plan: Extension, taken: list[int]) -> None:
        """Replace pages that other sequences share by copies."""
        for (row, column), page in zip(plan.copies, taken, strict=True):
            source = int(self.table[row, column])
            self.refs[source] -= 1
            self._more_owners -= 1
            self.table[row, column] = page
            self.synced[row] = min(self.synced[row], column)
            plan.copied.append((source, page))
        self.copies += len(plan.copies)

    def _write_taken(self, plan: Extension) -> None:
        """The pages of the growing sequences."""
        rows = plan.rows.take(plan.growing)
        if len(plan.taken) == len(rows):  # one for each
            self.table[rows, plan.first] = plan.taken
        else:
            at, columns = _spread(plan.first, plan.end)
            self.table[rows[at], columns] = plan.taken
        self.owned[rows] = plan.end

    def undo(self, plan: Extension) -> None:
        """Restore the previous state, except for evicted cached pages; the whole state is uploaded again."""
        for (row, column), (source, page) in zip(plan.copies, plan.copied, strict=True):
            self.table[row, column] = source
            self.refs[source] += 1
            self._more_owners += 1
            self.refs[page] = 0
            self._put_back(np.array([page]))
        for row, length, owned in zip(plan.rows.tolist(), plan.before, plan.owned, strict=True):
            self._drop(row, int(owned))
            self.length[row] = length
        self.copies -= len(plan.copies)
        self.synced[:] = 0
        self.dirty |= self.active
        self.changed = True

    def plan_reserve(self, row: int, tokens: int) -> int:
        """Pages that a sequence lacks for `tokens` more; errors as for `plan_extend`."""
        needed = self.pages_for(int(self.length[row]) + tokens)
        if needed > self.max_pages:
            most = self.max_pages * self.page_size
            raise ArgumentError(explain("tokens", tokens, f"at most {most} per sequence: max_pages * page_size"))
        missing = max(0, needed - int(self.owned[row]))
        self._check_pages(missing)
        return missing

    def reserve(self, row: int, pages: int) -> None:
        """Reserve pages; the next step, of any sequence, uploads them."""
        if pages:
            owned = int(self.owned[row])
            self.table[row, owned : owned + pages] = self._take(pages)
            self.owned[row] += pages
            self.dirty[row] = self.changed = True

    def _shared_tails(self, rows: Array, before: Array, counts: Array | int) -> list[tuple[int, int]]:
        """Partly filled pages that are written while other sequences share them. The last of several writers keeps the
        page.
        """
        writing = (counts > 0) & (before % self.page_size != 0)
        columns = before // self.page_size
        tails = self.table[rows, np.minimum(columns, self.max_pages - 1)]
        shared = np.flatnonzero(writing & (self.refs[tails] > 1))
        left = {int(tails[at]): int(self.refs[tails[at]]) for at in shared}
        copies = []
        for at in shared:
            page = int(tails[at])
            if left[page] > 1:
                left[page] -= 1
                copies.append((int(rows[at]), int(columns[at])))
        return copies

    def forget_tails(self, plan: Extension) -> None:
        """Pages that the step will write can no longer be found by their old hashes."""
        if self.prefixes.is_empty:
            return
        written = (plan.after > plan.before) & (plan.before % self.page_size != 0)
        tails = self.table[plan.rows, np.minimum(plan.before // self.page_size, self.max_pages - 1)]
        for page in tails[written & self.prefixes.hashed[tails]]:
            self.prefixes.forget(int(page))

    # ---- Pages ------------------------------------------------------------------------------------------------

    @property
    def available(self) -> tuple[int, int]:
        """Number of empty pages, and of pages that only their hashes keep."""
        return self._num_free, len(self._unused)

    def _check_pages(self, needed: int) -> None:
        free, cached = self.available
        if needed > free + cached:
            remedy = "free or truncate sequences, and try again"
            raise CacheFullError(explain("pages", f"{needed} more", f"at most {free} free and {cached} cached", remedy))

    def _take(self, count: int) -> Array:
        """Allocate pages for one owner each; the oldest cached ones are evicted if there is no free one."""
        while self._num_free < count:
            page = next(iter(self._unused))
            del self._unused[page]
            self.prefixes.forget(page)
            self.evictions += 1
            self._put_back(np.array([page]))
        self._num_free -= count
        pages: Array = self._free[self._num_free : self._num_free + count][::-1].copy()
        self.refs[pages] = 1
        return pages

    def _take_shared(self, pages: Array) -> None:
        unused = pages[self.refs[pages] == 0].tolist()
        for page in unused:
            del self._unused[page]
        self.refs[pages] += 1
        self._more_owners += len(pages) - len(unused)

    def _drop(self, row: int, keep: int) -> None:
        """Release the pages from column `keep` on, the last one first."""
        owned = int(self.owned[row])
        if owned > keep:
            pages = self.table[row, keep:owned][::-1].copy()
            self.refs[pages] -= 1
            given_up = pages[self.refs[pages] == 0]
            self._more_owners -= len(pages) - len(given_up)
            self._put_back(given_up)
            self.owned[row] = keep
        self.synced[row] = min(self.synced[row], keep)

    def _put_back(self, pages: Array) -> None:
        """Take back pages without a sequence. Of pages with equal contents, one stays cached."""
        for page in pages[self.prefixes.hashed[pages]].tolist():
            if self.prefixes.has_equal(page):
                self.prefixes.forget(page)
            else:
                self._unused[page] = None
        empty = pages[~self.prefixes.hashed[pages]]
        self._free[self._num_free : self._num_free + len(empty)] = empty
        self._num_free += len(empty)

    # ---- Checks -----------------------------------------------------------------------------------------------

    def wasted(self) -> int:
        """Token positions without a token in the pages of sequences. Of a page's owners, the one with the most tokens
        counts.
        """
        rows, columns = _spread(np.zeros_like(self.owned), self.owned)
        pages, tokens = self.table[rows, columns], self.length[rows] - columns * self.page_size
        fullest = np.zeros(self.num_pages, np.int64)
        np.maximum.at(fullest, pages, tokens.clip(0, self.page_size))
        return int(np.count_nonzero(self.refs)) * self.page_size - int(fullest.sum())

    def verify(self) -> list[str]:
        """Inconsistencies of the state: none, unless there is a bug."""
        wrong = self.prefixes.verify()
        if self.length.max() > self._longest:
            wrong.append(f"a sequence is longer than {self._longest} tokens")
        counted = np.zeros(self.num_pages, np.int32)
        for row in np.flatnonzero(self.active):
            pages = self.table[row, : self.owned[row]]
            if len(set(pages.tolist())) != len(pages) or ((pages < 0) | (pages >= self.num_pages)).any():
                wrong.append(f"row {row} has a page twice, or one that is none")
            np.add.at(counted, pages, 1)
            if not self.pages_for(int(self.length[row])) <= self.owned[row] <= self.max_pages:
                wrong.append(f"row {row} has {self.owned[row]} pages for {self.length[row]} tokens")
        if (counted != self.refs).any() or np.maximum(counted - 1, 0).sum() != self._more_owners:
            wrong.append("counts of owners")
        free, unused = set(self._free[: self._num_free].tolist()), set(self._unused)
        used = set(np.flatnonzero(self.refs).tolist())
        if len(free) != self._num_free or free & unused or (free | unused) & used:
            wrong.append("a page is in two lists")
        if len(free) + len(unused) + len(used) != self.num_pages:
            wrong.append("a page is in no list")
        if not self.prefixes.hashed[sorted(unused)].all() or self.prefixes.hashed[sorted(free)].any():
            wrong.append("a cached page has no hash, or a free one has")
        untold = ~self.dirty & (self.synced != self.owned)
        wrong += [f"row {row} has pages that the device is not told of" for row in np.flatnonzero(untold)]
        if self.dirty.any() and not self.changed:
            wrong.append("rows are marked that the next step leaves out")
        return wrong

    def compare(self, table: Array, seqlens: Array) -> list[str]:
        """Differences between the device's arrays and the uploaded state: none, unless there is a bug.

        Rows that have changed since the latest step may differ in their lengths, and beyond the pages that the device
        knows, and so may leftovers of freed sequences in a row.
        """
        told = np.arange(self.max_pages) < self.synced[:, None]
        wrong = [
            f"row {row}, column {column} of the device's block table is page {table[row, column]}, "
            f"expected {self.table[row, column]}"
            for row, column in np.argwhere(told & (table != self.table))
        ]
        wrong += [
            f"row {row} of the device's seqlens is {seqlens[row]}, expected {self.length[row]}"
            for row in np.flatnonzero(~self.dirty & (seqlens != self.length))
        ]
        return wrong


def _spread(begin: Array, end: Array) -> tuple[Array, Array]:
    """All numbers from begin[i] to end[i], and i for each."""
    counts = end - begin
    at = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return at, np.arange(len(at)) - first[at] + begin[at]


def _handles(given: Any) -> Array:
    """A list of sequences as an array."""
    expected = "a list, such as [sequence], of numbers from `allocate` or `fork`"
    if isinstance(given, np.ndarray):
        values = whole_numbers("sequences", given, expected)
        if values.ndim == 1:
            return values
    elif not isinstance(given, _NO_LISTS):
        try:
            return np.array(array("q", given), np.int64)  # several times as fast as from the list
        except (TypeError, ValueError, OverflowError, NotImplementedError):  # the last of memory that has axes
            pass
    raise ArgumentError(explain("sequences", repr(given), expected))
