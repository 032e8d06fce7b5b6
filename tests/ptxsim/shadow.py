"""Shadow memory of the race detector: who wrote and who read each word."""

from __future__ import annotations

import numpy as np

PENDING = np.uint32(0xFFFFFFFF)
"""The clock of a write that has not finished."""


class Shadow:
    """What the detector knows about each 4-byte word of one block's shared memory, tensor memory or a global array.

    ``columns`` tells the columns of tensor memory; ``name`` is the name of a global array. ``updates`` holds, per
    agent, when it last wrote each word strongly: such writes do not order one another, so the last cannot stand for
    all.
    """

    def __init__(self, words: int, columns: int = 0, name: str = "") -> None:
        self.columns, self.name = columns, name
        self.writer = np.zeros(words, np.intp)
        self.clock = np.zeros(words, np.uint32)
        self.mask = np.full(words, 15, np.uint8)
        self.strength = np.zeros(words, np.uint8)
        self.updates: dict[int, np.ndarray] = {}
        self.rows: dict[tuple, int] = {}
        self.row_agents = np.zeros((0, 4), np.intp)
        self.strong_rows = np.zeros(0, bool)
        self.reads = np.zeros((0, words), np.uint32)
        self.read_masks: np.ndarray | None = None

    def space(self, word: int) -> str:
        """Describe where a word is."""
        if self.columns:
            return f"tensor memory lane {word // self.columns} column {word % self.columns}"
        return f"byte {word * 4} of {self.name}" if self.name else f"shared byte {word * 4}"

    def row(self, agents: tuple[int, ...], strong: bool = False) -> int:
        """Return the read row of an agent, or of four that read together; strong reads have rows of their own."""
        key = (*agents, "strong") if strong else agents
        if key not in self.rows:
            index = self.rows[key] = len(self.rows)
            if index >= len(self.reads):
                grown = np.zeros((max(8, 2 * len(self.reads)), self.reads.shape[1]), np.uint32)
                grown[: len(self.reads)] = self.reads
                self.reads = grown
                self.read_masks = None if self.read_masks is None else _grow_masks(self.read_masks, len(grown))
            four = agents if len(agents) == 4 else agents * 4
            self.row_agents = np.concatenate([self.row_agents, np.array([four], np.intp)])
            self.strong_rows = np.append(self.strong_rows, strong)
        return self.rows[key]

    def update(self, agent: int, words: np.ndarray, clock: object) -> None:
        """Remember a strong write."""
        if agent not in self.updates:
            self.updates[agent] = np.zeros(len(self.clock), np.uint32)
        self.updates[agent][words] = clock

    def mark_read(self, index: int, words: np.ndarray, mask: object) -> None:
        """Remember which bytes of words a row has read."""
        if self.read_masks is None:
            self.read_masks = np.full(self.reads.shape, 15, np.uint8)
        self.read_masks[index, words] = 0
        np.bitwise_or.at(self.read_masks[index], words, mask)


def _grow_masks(masks: np.ndarray, rows: int) -> np.ndarray:
    """Return read masks with more rows."""
    grown = np.full((rows, masks.shape[1]), 15, np.uint8)
    grown[: len(masks)] = masks
    return grown
