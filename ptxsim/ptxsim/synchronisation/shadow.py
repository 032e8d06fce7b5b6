"""Shadow memory of the race detector: who wrote and who read each word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic.numeric import count_nonzero

PENDING = np.uint32(0xFFFFFFFF)
"""The clock of a write that has not finished."""


def _with_one_more(array: np.ndarray, value: int) -> np.ndarray:
    """Return an array with another element at its end, of the same dtype."""
    longer = np.empty(len(array) + 1, array.dtype)
    longer[:-1], longer[-1] = array, value
    return longer


@dataclass(frozen=True)
class Box:
    """Lanes and columns of tensor memory that lie side by side, ``width`` columns a lane."""

    lanes: slice
    columns: slice
    width: int

    def of(self, table: np.ndarray) -> np.ndarray:
        """Return the part of a table of all cells."""
        return table.reshape(-1, self.width)[self.lanes, self.columns]

    def cells(self) -> np.ndarray:
        """Return the numbers of the cells."""
        return self.of(np.arange(self.lanes.stop * self.width)).reshape(-1)


class Shadow:
    """Knowledge of the detector about each 4-byte word of a block's shared memory, tensor memory or a global array.

    ``sites`` holds the numbers of the instructions that wrote; ``reads`` holds, per row, when each word was read and by
    which instruction.

    ``columns`` is the number of columns of tensor memory; ``name`` is the name of a global array, ``block`` the owner
    of shared memory. ``mask`` tells which bytes of a word the last write covered; ``bytes`` holds, per agent and mask,
    when it wrote bytes that later writes to the word left alone. ``updates`` holds, per agent, when it last wrote each
    word strongly, in its clock and in a count of all strong writes: such writes do not order one another, so the last
    cannot stand for all. ``observed`` holds, per agent, up to which count it has seen the strong writes of a word by a
    strong read or an atomic of its own, and when: what it has seen precedes what it does next (ISA, causality order),
    even if it acquires nothing.

    Summaries of all words keep most checks short: ``row_tops`` is the last clock of each row of reads, ``hidden`` the
    last clock of each agent's writes in ``updates`` and ``bytes``; ``aside`` tells whether there are any,
    ``partial`` and ``strong`` whether some write ever had a mask, or was strong.
    """

    def __init__(self, words: int, columns: int = 0, name: str = "", block: tuple[int, ...] = ()) -> None:
        self.columns, self.name, self.block = columns, name, block
        self.writer = np.zeros(words, np.intp)
        self.clock = np.zeros(words, np.uint32)
        self.mask = np.full(words, 15, np.uint8)
        self.strength = np.zeros(words, np.uint8)
        self.updates: dict[int, np.ndarray] = {}
        self.observed: dict[int, np.ndarray] = {}
        self.count = 0
        self.sites = np.full(words, -1, np.int32)
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []
        self.rows: dict[tuple, int] = {}
        self.row_agents = np.zeros(0, np.intp)
        self.strong_rows = np.zeros(0, bool)
        self.row_masks = np.zeros(0, np.uint8)
        self.row_tops = np.zeros(0, np.uint32)
        self.bytes: dict[tuple[int, int], np.ndarray] = {}
        self.aside = self.partial = self.strong = False
        self.hidden = np.zeros(0, np.uint32)

    def hides(self, row: np.ndarray) -> bool:
        """Tell whether a write that the last write of its word may hide is unknown to somebody."""
        return bool(count_nonzero(self.hidden > row[: len(self.hidden)]))

    def _hide(self, agent: int, clock: int) -> None:
        """Note up to which clock writes of an agent may be hidden by the last writes of their words."""
        self.aside = True
        if agent >= len(self.hidden):
            self.hidden = np.concatenate([self.hidden, np.zeros(agent + 1 - len(self.hidden), np.uint32)])
        self.hidden[agent] = max(self.hidden[agent], clock)

    def settle(self, agent: int) -> None:
        """Look again up to which clock writes of an agent may be hidden: a pending one has finished."""
        tables = [self.updates[agent][0]] if agent in self.updates else []
        tables += [clocks for (writer, _), clocks in self.bytes.items() if writer == agent]
        self.hidden[agent] = max(table.max() for table in tables)

    def note_read(self, row: int, words: np.ndarray, clock: int, site: int) -> None:
        """Record a read in a row."""
        clocks, sites = self.reads[row]
        clocks[words] = clock
        sites[words] = site
        if clock > self.row_tops[row]:
            self.row_tops[row] = clock

    def space(self, word: int) -> str:
        """Describe where a word is."""
        if self.columns:
            return f"tensor memory lane {word // self.columns} column {word % self.columns}"
        return f"byte {word * 4} of {self.name}" if self.name else f"shared byte {word * 4}"

    def row(self, agent: int, strong: bool = False, mask: int = 15) -> int:
        """Return the read row of an agent.

        Strong reads, and reads of some bytes of words (a mask), have rows of their own.
        """
        key = (agent, strong, mask)
        index = self.rows.get(key)
        if index is None:
            index = self.rows[key] = len(self.rows)
            self.reads.append((np.zeros(len(self.clock), np.uint32), np.zeros(len(self.clock), np.int32)))
            for name, value in (("row_agents", agent), ("strong_rows", strong), ("row_masks", mask), ("row_tops", 0)):
                setattr(self, name, _with_one_more(getattr(self, name), value))
        return index

    def update(self, agent: int, words: np.ndarray, clock: Any) -> None:
        """Remember a strong write."""
        self.count += 1
        clocks, counts = self.updates.setdefault(agent, np.zeros((2, len(self.clock)), np.uint32))
        clocks[words] = clock
        self._hide(agent, clock)
        counts[words] = PENDING if clock == PENDING else self.count

    def observe(self, agent: int, words: np.ndarray, clock: Any) -> None:
        """Remember that an agent has seen the strong writes to words so far."""
        counts, clocks = self.observed.setdefault(agent, np.zeros((2, len(self.clock)), np.uint32))
        counts[words], clocks[words] = self.count, clock

    def seen(self, writer: int, words: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Tell which strong writes of an agent were seen by somebody who is ordered before an access."""
        result = np.zeros(np.shape(words), bool)
        for observer, (counts, clocks) in self.observed.items():
            result |= (self.updates[writer][1][words] <= counts[words]) & (clocks[words] <= row[observer])
        return result

    def seen_last(self, words: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Tell which words' last writes are strong ones that were seen, as by :meth:`seen`."""
        result = np.zeros(np.shape(words), bool)
        if self.observed:
            writers, strong = self.writer[words], self.strength[words] > 0
            for writer in set(writers[strong].tolist()) & self.updates.keys():
                result |= strong & (writers == writer) & self.seen(writer, words, row)
        return result

    def cover(self, agent: int, words: np.ndarray, mask: np.ndarray, clock: int) -> None:
        """Note which bytes of words a write covers, and keep the records of the other bytes."""
        words, place = np.unique(words, return_inverse=True)
        covered = np.zeros(len(words), np.uint8)
        np.bitwise_or.at(covered, place, mask)
        left = np.where(self.clock[words] > 0, self.mask[words] & ~covered, 0).astype(np.uint8)
        same = (self.writer[words] == agent) & (self.clock[words] == clock)
        self.mask[words] = np.where(same, covered | left, covered)
        aside = (left != 0) & ~same & (self.clock[words] != PENDING)
        for writer, bits in {*zip(self.writer[words[aside]].tolist(), left[aside].tolist(), strict=True)}:
            at = words[aside & (self.writer[words] == writer) & (left == bits)]
            clocks = self.bytes.setdefault((writer, bits), np.zeros(len(self.clock), np.uint32))
            clocks[at] = self.clock[at]
            self._hide(writer, int(clocks[at].max()))
