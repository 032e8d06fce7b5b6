"""Reports of a warp's generic accesses to the race detector, and the places that findings name."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..arithmetic.numeric import constant
from ..parsing.ir import Instr
from ..synchronisation.strong import Order

_TWO = constant(2, "u4")


class Accesses:
    """The part of a :class:`~.warp.Warp` that reports to the race detector."""

    cta: Any
    home: Any
    agent: Any
    shadows: Any

    def shared_read(
        self, shadow: Any, offset: np.ndarray, width: int, count: int, ins: Instr, order: Order | None = None
    ) -> None:
        """Tell the detector about a generic read of this block's shared memory."""
        size = width * count
        if order is None and size >= 4:
            ((words, _),) = word_runs(offset, size)
            self.cta.cluster.detector.read(self.agent, shadow, words, Where(self, ins))
        else:
            self._read(shadow, self.cta.rank, offset, size, ins, order)

    def shared_write(
        self,
        shadow: Any,
        offset: np.ndarray,
        width: int,
        count: int,
        ins: Instr,
        order: Order | None = None,
        update: bool | None = None,
        stored: tuple | None = None,
    ) -> None:
        """Tell the detector about a generic write of this block's shared memory (``update``: see flags_write).

        ``stored`` is the memory, the lanes' indices in it and the values, for a store that may change nothing.
        """
        self._write(shadow, self.cta.rank, offset, width * count, ins, order, update, stored)

    def global_read(self, buffer: Any, offset: np.ndarray, size: int, ins: Instr, order: Order | None) -> None:
        """Tell the detector about a generic read of global memory."""
        if self.shadows is not None:
            self._read(self.shadows.of(buffer), buffer.base, offset.astype("u4"), size, ins, order)
        elif order is not None:
            self.flags_read(buffer.base, offset, order)

    def global_write(
        self,
        buffer: Any,
        offset: np.ndarray,
        size: int,
        ins: Instr,
        order: Order | None,
        update: bool | None = None,
        stored: tuple | None = None,
    ) -> None:
        """Tell the detector about a generic write of global memory (see :meth:`shared_write`)."""
        if self.shadows is not None:
            self._write(self.shadows.of(buffer), buffer.base, offset.astype("u4"), size, ins, order, update, stored)
        elif order is not None:
            self.flags_write(buffer.base, offset, order, update)

    def _read(self, shadow: Any, space: int, offset: np.ndarray, size: int, ins: Instr, order: Order | None) -> None:
        detector, place = self.cta.cluster.detector, Where(self, ins)
        for words, mask in word_runs(offset, size):
            detector.read(self.agent, shadow, words, place, mask, order.strength if order else 0)
        if order is not None:
            self.flags_read(space, offset, order)

    def _write(
        self,
        shadow: Any,
        space: int,
        offset: np.ndarray,
        size: int,
        ins: Instr,
        order: Order | None,
        update: bool | None,
        stored: tuple | None = None,
    ) -> None:
        detector, place = self.cta.cluster.detector, Where(self, ins)
        for words, mask in word_runs(offset, size):
            detector.write(self.agent, shadow, words, place, mask, order.strength if order else 0, stored)
            if update and order:
                shadow.observe(self.agent, words, detector.V[self.agent, self.agent])
        if order is not None:
            self.flags_write(space, offset, order, update)

    def flags_read(self, space: int, offset: np.ndarray, order: Order) -> None:
        """Order this warp after the releases at some bytes of a space (a block's rank, or an array's base)."""
        detector = self.cta.cluster.detector
        if detector and detector.flags.places:
            detector.flags.read(self.agent, self.home, [(space, int(at)) for at in offset], order)

    def flags_write(self, space: int, offset: np.ndarray, order: Order, update: bool | None) -> None:
        """Release at some bytes of a space; ``update`` is None for a store, or whether an atomic returns old values."""
        detector = self.cta.cluster.detector
        if not detector or not detector.flags.matter(self.agent, order, update is False):
            return
        keys = [(space, int(at)) for at in offset]
        if update:
            detector.flags.read(self.agent, self.home, keys, order)
        detector.flags.write(self.agent, self.home, keys, order, update is not None)


class Where:
    """A location that is only formatted when an error needs it."""

    __slots__ = ("ins", "warp")

    def __init__(self, warp: Any, ins: Instr) -> None:
        self.warp, self.ins = warp, ins

    def __str__(self) -> str:
        return self.warp.where(self.ins).rstrip()

    def changed(self, bad: np.ndarray, stored: tuple) -> np.ndarray:
        """Drop conflicts of a store with another warp's that stored the same value, and note them."""
        view, index, values = stored
        same: np.ndarray = np.ones(len(index), bool)
        for k, (value, poison) in enumerate(zip(values[::2], values[1::2], strict=True)):
            same &= (view[index + k] == value) & (True if poison is None else ~poison)
        same = np.repeat(same, bad.size // same.size).reshape(bad.shape)
        if (bad & same).any():
            self.warp.launch.note(f"{self.warp.where(self.ins)}stores what another warp has stored there, unordered")
        return bad & ~same


@functools.cache
def _steps(size: int) -> np.ndarray:
    """Word offsets of an access of some bytes."""
    return np.arange(size // 4)


def word_runs(offset: np.ndarray, size: int) -> list[tuple[np.ndarray, Any]]:
    """Return (word indices, byte mask) for an access of ``size`` bytes per lane."""
    words = (offset >> _TWO).astype(np.intp)
    if size < 4:
        mask = (np.uint8((1 << size) - 1) << (offset & np.uint32(3)).astype("u1")).astype("u1")
        return [(words, mask)]
    if size == 4:
        return [(words, 15)]
    return [((words[:, None] + _steps(size)).reshape(-1), 15)]
