"""Shadow memory of the race detector: who wrote and who read each word."""

from __future__ import annotations

import numpy as np

PENDING = np.uint32(0xFFFFFFFF)
"""The clock of a write that has not finished."""


class Shadow:
    """What the detector knows about each 4-byte word of one block's shared memory, tensor memory or a global array.

    ``columns`` tells the columns of tensor memory; ``name`` is the name of a global array. ``mask`` tells which bytes
    of a word the last write covered; ``bytes`` holds, per agent and mask, when it wrote bytes that later writes to the
    word left alone. ``updates`` holds, per agent, when it last wrote each word strongly, in its clock and in a count of
    all strong writes: such writes do not order one another, so the last cannot stand for all. ``observed`` holds, per
    agent, up to which count it has seen the strong writes of a word by a strong read or an atomic of its own, and when:
    what it has seen precedes what it does next (ISA, causality order), even if it acquires nothing.
    """

    def __init__(self, words: int, columns: int = 0, name: str = "") -> None:
        self.columns, self.name = columns, name
        self.writer = np.zeros(words, np.intp)
        self.clock = np.zeros(words, np.uint32)
        self.mask = np.full(words, 15, np.uint8)
        self.strength = np.zeros(words, np.uint8)
        self.updates: dict[int, np.ndarray] = {}
        self.observed: dict[int, np.ndarray] = {}
        self.count = 0
        self.rows: dict[tuple, int] = {}
        self.row_agents = np.zeros((0, 4), np.intp)
        self.strong_rows = np.zeros(0, bool)
        self.row_masks = np.zeros(0, np.uint8)
        self.reads = np.zeros((0, words), np.uint32)
        self.bytes: dict[tuple[int, int], np.ndarray] = {}

    def space(self, word: int) -> str:
        """Describe where a word is."""
        if self.columns:
            return f"tensor memory lane {word // self.columns} column {word % self.columns}"
        return f"byte {word * 4} of {self.name}" if self.name else f"shared byte {word * 4}"

    def row(self, agents: tuple[int, ...], strong: bool = False, mask: int = 15) -> int:
        """Return the read row of an agent, or of four that read together.

        Strong reads, and reads of some bytes of words (a mask), have rows of their own.
        """
        key = agents if mask == 15 and not strong else (*agents, strong, mask)
        if key not in self.rows:
            index = self.rows[key] = len(self.rows)
            if index >= len(self.reads):
                grown = np.zeros((max(8, 2 * len(self.reads)), self.reads.shape[1]), np.uint32)
                grown[: len(self.reads)] = self.reads
                self.reads = grown
            four = agents if len(agents) == 4 else agents * 4
            self.row_agents = np.concatenate([self.row_agents, np.array([four], np.intp)])
            self.strong_rows = np.append(self.strong_rows, strong)
            self.row_masks = np.append(self.row_masks, np.uint8(mask))
        return self.rows[key]

    def update(self, agent: int, words: np.ndarray, clock: object) -> None:
        """Remember a strong write."""
        self.count += 1
        clocks, counts = self.updates.setdefault(agent, np.zeros((2, len(self.clock)), np.uint32))
        clocks[words] = clock
        counts[words] = PENDING if clock == PENDING else self.count

    def observe(self, agent: int, words: np.ndarray, clock: object) -> None:
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
        """Note which bytes of words a write covers, and keep what is known of the other bytes."""
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
