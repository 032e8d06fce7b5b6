"""Run-time behaviour of cp.async: copies of a warp's lanes, groups of each lane, arrivals on mbarriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, count_nonzero
from ..errors import MemoryFault
from ..parsing.ir import Instr
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from .bulk_copies import read_bytes
from .mbarrier import find, groups

_ALL, _EVERY = np.arange(32), np.ones(32, bool)
_DEFINED = 0x01010101
_STEPS = {size: np.arange(size // 4) for size in (4, 8, 16)}
"""Word offsets of a copy of some bytes."""
_WHOLE = {size: np.full(32, size) for size in _STEPS}
"""Sizes of the copies of 32 lanes when each lane copies all bytes."""


class Copy:
    """One executed cp.async: the copy of each lane, and which lanes have finished."""

    def __init__(
        self, W: Warp, number: int, lanes: np.ndarray, offset: np.ndarray, source: np.ndarray, size: int
    ) -> None:
        self.cta, self.number, self.size = W.cta, number, size
        self.lanes, self.source = lanes, source
        self.complete: Callable | None = None
        self.left = np.zeros(32, bool)
        self.left[lanes] = True
        self.words = (offset >> 2)[:, None] + _STEPS[size]

    def finish(self, W: Warp, ins: Instr, take: np.ndarray, wanted: np.ndarray) -> None:
        """Perform the copies of the wanted lanes that are still open; bytes past ``take`` are zeros."""
        pick = wanted[self.lanes] & self.left[self.lanes]
        count = int(count_nonzero(pick))
        if not count:
            return
        words, source = self.words, self.source
        if count < len(pick):
            words, source, take = words[pick], source[pick], take[pick]
        self.left[self.lanes[pick]] = False
        data = self._gathered(W, source, take)
        if data is None:
            raw = np.zeros((count, self.size), "u1")
            for row, size, address in zip(raw, take, source, strict=True):
                if size:
                    row[:size] = read_bytes(W, ins, int(address), int(size))
            data = raw.view("u4")
        self.cta.shared.view("u4")[words] = data
        self.cta.shared.init_view(4)[words] = _DEFINED
        if self.cta.shadow is not None:
            state = cp_state(W)
            W.cta.cluster.detector.finish_write(self.cta.shadow, words.reshape(-1), state.agent, self.number)

    def _gathered(self, W: Warp, source: np.ndarray, take: np.ndarray) -> np.ndarray | None:
        """Return the words of lanes that all copy their full size from inside one array (None: they do not)."""
        buffer = W.memory.find(int(source[0])) if count_nonzero(take == self.size) == len(source) else None
        if buffer is None or buffer.base % 4:
            return None
        offset = source - np.uint64(buffer.base)  # what lies below the array wraps to a large number
        if int(offset.max()) + self.size > buffer.size:
            return None
        return buffer.view("u4")[(offset.view(np.intp) >> 2)[:, None] + _STEPS[self.size]]


class CpAsync:
    """cp.async bookkeeping of a warp: copies are numbered, and each lane has its own groups.

    ``groups`` holds, per committed group, the number of each lane's newest copy in it. While all lanes commit together
    it is one list; a commit by some of them makes it a list per lane.
    """

    def __init__(self, W: Warp) -> None:
        self.issued = 0
        self.open: dict[int, Copy] = {}
        self.newest = np.zeros(32, np.int64)
        self.groups: list[np.ndarray] = []
        self.apart: list[list[int]] | None = None
        detector = W.cta.cluster.detector
        # By the letter of the model cp.async writes through the generic proxy; production kernels rely on less.
        self.agent = detector.new_agent(f"cp.async of {W.name}", True, soft=True) if detector else 0

    def complete(self, W: Warp, need: np.ndarray) -> None:
        """Finish every lane's copies up to its number."""
        last = int(need.max())
        for number, copy in list(self.open.items()):
            if number > last:
                break
            wanted = need >= number
            if count_nonzero(copy.left & ~wanted):
                copy.complete(wanted)
            else:
                W.cta.cluster.progress(("cp", id(W), number))

    def commit(self, L: LaneSet) -> None:
        """Close a group of some lanes."""
        if L is None and self.apart is None:
            self.groups.append(self.newest.copy())
            return
        if self.apart is None:
            self.apart = [[int(group[lane]) for group in self.groups] for lane in range(32)]
        for lane in _ALL if L is None else L:
            self.apart[lane].append(int(self.newest[lane]))

    def needed(self, L: LaneSet, keep: int | None) -> np.ndarray:
        """Return, per lane, the number up to which its copies must have finished (0: none)."""
        need = np.zeros(32, np.int64)
        lanes = _ALL if L is None else L
        if keep is None:
            need[lanes] = self.newest[lanes]
        elif self.apart is None:
            if len(self.groups) > keep:
                need[lanes] = self.groups[len(self.groups) - 1 - keep][lanes]
        else:
            for lane in lanes:
                ends = self.apart[lane]
                need[lane] = ends[len(ends) - 1 - keep] if len(ends) > keep else 0
        return need


def cp_state(W: Warp) -> CpAsync:
    """Return a warp's cp.async state."""
    if "cp" not in W.state:
        W.state["cp"] = CpAsync(W)
    return W.state["cp"]


def cp_async_copy(
    W: Warp,
    L: LaneSet,
    ins: Instr,
    dst: np.ndarray,
    src: np.ndarray,
    size: int,
    source_size: np.ndarray | None,
) -> None:
    """Issue cp.async of ``size`` bytes per lane; bytes past ``source_size`` are zeros."""
    cta, state = W.cta, cp_state(W)
    offset = (dst - cta.shared_base).astype("i8")
    if count_nonzero(dst & np.uint32(size - 1)):
        W.misaligned(ins, dst, size, L)
    if int(offset.max()) + size > cta.shared.limit:  # what lies below the window has wrapped to a large number
        W.out_of_shared(ins, dst, L)
    if count_nonzero(src & np.uint64(size - 1)):
        W.misaligned(ins, src, size, L)
    take = _WHOLE[size][: len(dst)]
    if source_size is not None and source_size.dtype == bool:
        take = np.where(source_size, 0, size)
    elif source_size is not None:
        take = source_size.astype("i8")
        if int(take.max()) > size:
            W.fail(MemoryFault, ins, f"the source size {int(take.max())} exceeds the copy size {size}")
    state.issued += 1
    lanes = _ALL if L is None else L
    state.newest[lanes] = state.issued
    copy = state.open[state.issued] = Copy(W, state.issued, lanes, offset, src, size)
    _tell(W, ins, copy, take)
    cta.shared.init_view(4)[copy.words] = 0

    def finish(wanted: np.ndarray = _EVERY) -> None:
        copy.finish(W, ins, take, wanted)
        if not count_nonzero(copy.left):
            state.open.pop(copy.number, None)

    copy.complete = finish
    cta.cluster.submit(("cp", id(W), copy.number), AsyncOp("cp.async", finish))
    W.traffic[5] += int(take.sum())


def _tell(W: Warp, ins: Instr, copy: Copy, take: np.ndarray) -> None:
    """Tell the race detector what a copy reads and writes."""
    detector, state = W.cta.cluster.detector, cp_state(W)
    if not detector:
        return
    view, where = detector.generic_view(W.agent), Where(W, ins)
    if W.cta.shadow is not None:
        detector.async_write(W.agent, view, W.cta.shadow, copy.words.reshape(-1), state.agent, where)
    if W.shadows is not None:
        whole = None if detector.watch else W.shadows.words_of_rows(copy.source, take, copy.size)
        if whole is not None:
            detector.async_read(W.agent, view, *whole, state.agent, copy.number, where)
            return
        for address, count in zip(copy.source, take, strict=True):
            touched = W.shadows.words(int(address), int(count)) if count else None
            if touched:
                detector.async_read(W.agent, view, *touched, state.agent, copy.number, where)


def cp_async_commit(W: Warp, L: LaneSet) -> None:
    """cp.async.commit_group: each lane's copies so far."""
    cp_state(W).commit(L)


def cp_async_wait(W: Warp, L: LaneSet, keep: int | None) -> None:
    """cp.async.wait_group (or wait_all when ``keep`` is None) of each lane."""
    state = cp_state(W)
    need = state.needed(L, keep)
    state.complete(W, need)
    detector = W.cta.cluster.detector
    if detector:
        detector.learn(W.agent, state.agent, int(need.max()))


def cp_async_arrive(W: Warp, L: LaneSet, ins: Instr, a: np.ndarray, noinc: bool) -> None:
    """cp.async.mbarrier.arrive: arrive when all prior cp.async of each lane have finished."""
    state = cp_state(W)
    lanes = _ALL if L is None else L
    for address, positions in groups(a):
        barrier = find(W, ins, address, False)
        if not noinc:
            barrier.pending += len(positions)
        need = np.zeros(32, np.int64)
        need[lanes[positions]] = state.newest[lanes[positions]]

        def finish(barrier: Any = barrier, count: int = len(positions), need: np.ndarray = need) -> None:
            state.complete(W, need)
            barrier.gather_clock(state.agent, int(need.max()))
            barrier.arrive(count)

        W.cta.cluster.submit(None, AsyncOp("cp.async arrive", finish))
