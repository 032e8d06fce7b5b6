"""Races between lanes of one warp in shared memory (``race_lanes=True``).

Lanes of a warp are ordered by a barrier or an mbarrier, not by being executed together (ISA, memory consistency model;
a shuffle orders no memory). Between two such steps of a warp, no other lane may read or write bytes that one lane
writes. It knows loads and stores, byte by byte; any step of the warp counts for all of its lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet
from ..parsing.ir import Instr

_NOBODY = -1


class Lanes:
    """Lanes that have written and read each byte of a block's shared memory, and their epochs."""

    def __init__(self, size: int) -> None:
        self.written, self.read_in = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.writer, self.site = np.full(size, _NOBODY, np.int8), np.full(size, -1, np.int32)
        self.readers = np.zeros(size, np.uint32)

    def read(self, W: Any, ins: Instr, offset: np.ndarray, size: int, L: LaneSet) -> None:
        """Check and record a load of ``size`` bytes a lane."""
        at, lane = _bytes(offset, size), _lanes(L)
        bad = (self.written[at] == W.epoch) & (self.writer[at] != lane)
        if bad.any():
            self._report(W, ins, at, lane, bad, "reads", "wrote")
        self.readers[at[self.read_in[at] != W.epoch]] = 0
        self.read_in[at] = W.epoch
        np.bitwise_or.at(self.readers, at, _bit(lane))

    def write(self, W: Any, ins: Instr, offset: np.ndarray, size: int, L: LaneSet) -> None:
        """Check and record a store of ``size`` bytes a lane."""
        at, lane = _bytes(offset, size), _lanes(L)
        bad = (self.written[at] == W.epoch) & (self.writer[at] != lane)
        if bad.any():
            self._report(W, ins, at, lane, bad, "writes", "wrote")
        bad = (self.read_in[at] == W.epoch) & ((self.readers[at] & ~_bit(lane)) != 0)
        if bad.any():
            self._report(W, ins, at, lane, bad, "writes", "read")
        self.written[at], self.writer[at], self.site[at] = W.epoch, lane, ins.number

    def _report(
        self, W: Any, ins: Instr, at: np.ndarray, lane: np.ndarray, bad: np.ndarray, verb: str, did: str
    ) -> None:
        row, column = np.argwhere(bad)[0]
        byte, mine = int(at[row, column]), int(lane[row, 0])
        others = int(self.readers[byte]) & ~(1 << mine)
        other = int(self.writer[byte]) if did == "wrote" else (others & -others).bit_length() - 1
        text = f"race at shared byte {byte}: lane {mine} of {W.name} {verb} what lane {other} {did}"
        text += " without a barrier between them"
        W.race(ins, text, "", W.name, int(self.site[byte]) if did == "wrote" else -1, None)


def _bytes(offset: np.ndarray, size: int) -> np.ndarray:
    """Return the bytes [lanes, size] of an access."""
    return offset[:, None].astype(np.intp) + np.arange(size)


def _lanes(L: LaneSet) -> np.ndarray:
    return np.arange(32)[:, None] if L is None else np.asarray(L)[:, None]


def _bit(lane: np.ndarray) -> np.ndarray:
    return np.uint32(1) << lane.astype(np.uint32)
