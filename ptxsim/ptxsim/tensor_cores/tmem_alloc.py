"""Allocation of tensor memory: alloc, dealloc, relinquish_alloc_permit, by one block or by a pair together."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet
from ..errors import MemoryFault, SyncError
from ..instructions.mbarrier import shared_target
from ..parsing.ir import Instr
from ..state.accesses import Where
from ..state.warp import Warp
from ..translation.codegen import Park
from .pipe import check_group, pair, pipe_of
from .tmem import COLUMNS, LANES, TensorMemory, tmem_of

_WRITER = "tcgen05.alloc"
"""Key under which a warp keeps the agent of the addresses that its allocations write."""


class Call:
    """A collective call of two peer blocks: their requests, and (alloc) the first column that both got."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple] = {}
        self.warps: list[Warp] = []
        self.start: int | None = None
        self.known: list = []

    @property
    def met(self) -> bool:
        """Tell whether both blocks have made the call."""
        return len(self.asked) == 2


def _meet(W: Warp, ins: Instr, request: tuple) -> Call:
    """Join the pair's next collective call; a warp that was parked in one goes on with it."""
    call = W.state.pop("tcgen05 call", None)
    if call is not None:
        return call
    waiting = pair(W, ins, 2)[0].state.setdefault("tcgen05 calls", [])
    call = next((c for c in waiting if W.cta.rank not in c.asked), None)
    if call is None:
        call = Call()
        waiting.append(call)
    else:
        waiting.remove(call)
        (other,) = call.asked.values()
        if other != request:
            names = [" ".join(map(str, each)) for each in (request, other)]
            W.fail(SyncError, ins, f"the blocks of a pair make different collective calls: {names[0]} and {names[1]}")
    call.asked[W.cta.rank] = request
    call.warps.append(W)
    return call


def _wait(W: Warp, call: Call, ready: Any, what: str) -> Park:
    W.state["tcgen05 call"] = call
    return Park(ready, what, redo=True)


def _whole_warp(W: Warp, ins: Instr, L: LaneSet, name: str) -> None:
    if L is not None:
        W.bend("tcgen05-collective", SyncError, ins, f"tcgen05.{name} needs all 32 lanes of the warp")


def alloc(W: Warp, ins: Instr, L: LaneSet, group: int, address: int, columns: int) -> Park | None:
    """tcgen05.alloc: write the address of free columns to shared memory, waiting until there are some."""
    check_group(W, ins, group)
    _whole_warp(W, ins, L, "alloc")
    if columns not in (32, 64, 128, 256, 512):
        W.fail(MemoryFault, ins, f"{columns} columns: the count must be a power of two in 32..512")
    tmem = tmem_of(W.cta)
    if not tmem.permit:
        W.fail(SyncError, ins, "tcgen05.alloc after relinquish_alloc_permit")
    room = f"waits for {columns} tensor-memory columns"
    if group == 1:
        start = tmem.place(columns)
        if start is None:
            return Park(lambda: tmem.place(columns) is not None, room, redo=True)
    else:
        call = _meet(W, ins, ("alloc", columns))
        if not call.met:
            return _wait(W, call, lambda: call.met, "waits for tcgen05.alloc of the peer block")
        peers = [tmem_of(W.cta.cluster.ctas[rank]) for rank in sorted(call.asked)]
        if call.start is None:
            call.start = peers[0].place(columns, peers[1])
            if call.start is None:
                return _wait(W, call, lambda: peers[0].place(columns, peers[1]) is not None, room)
            _take_both(call, columns)
        start = call.start
        _learn(W, call)
    if columns > tmem.smallest:
        why = f"{columns} columns after an allocation of {tmem.smallest}: the count must not increase"
        W.bend("alloc-grows", SyncError, ins, why)
    if group == 1:
        _take(W, tmem, start, columns)
    _write_address(W, ins, start, address)
    return None


def _take_both(call: Call, columns: int) -> None:
    """Give columns to both blocks of a pair at once: either may use the peer's as soon as its own call returns."""
    for warp in call.warps:
        _take(warp, tmem_of(warp.home), call.start, columns)
    detector = call.warps[0].home.cluster.detector
    if detector:
        for warp in call.warps:
            detector.publish(warp.agent, call.known)


def _learn(W: Warp, call: Call) -> None:
    """Order a warp after the allocations of both blocks, for its tensor-memory operations too."""
    detector = W.cta.cluster.detector
    if detector:
        detector.acquire(W.agent, call.known)
        for warp in call.warps:
            detector.tensor_learn(W.agent, warp.agent, int(call.known[0][warp.agent]))


def _write_address(W: Warp, ins: Instr, start: int, address: int) -> None:
    """Write the address of allocated columns to shared memory."""
    cta, offset = shared_target(W, ins, address, False)
    if offset % 4:
        W.fail(MemoryFault, ins, "the address for tcgen05.alloc is not a multiple of 4")
    if cta.shadow is not None:
        W.shared_write(cta.shadow, np.array([offset], "u4"), 4, 1, ins)
        _sign(W, cta, offset // 4)
    cta.shared.view("u4")[offset // 4] = start
    cta.shared.init[offset : offset + 4] = 1


def _sign(W: Warp, cta: Any, word: int) -> None:
    """Have the address written by an agent of its own: Triton lets copies overwrite it without a proxy fence."""
    detector = W.home.cluster.detector
    agent = W.state.get(_WRITER)
    if agent is None:
        agent = W.state[_WRITER] = detector.new_agent(f"tcgen05.alloc of {W.name}", True, soft=True)
    clock = int(detector.V[agent, agent])
    cta.shadow.writer[word], cta.shadow.clock[word] = agent, clock
    detector.learn(W.agent, agent, clock)
    detector.tick(agent)


def _take(W: Warp, tmem: TensorMemory, start: int, columns: int) -> None:
    """Give columns to a warp of a block."""
    tmem.take(start, columns, W.index)
    if tmem.shadow is not None:
        detector = W.home.cluster.detector
        words = _words(start, columns)
        # All who use the columns must have synchronised with the allocation.
        tmem.shadow.writer[words] = W.agent
        tmem.shadow.clock[words] = detector.V[W.agent, W.agent]
        detector.tensor_learn(W.agent, W.agent, int(detector.V[W.agent, W.agent]))


def _words(start: int, columns: int) -> np.ndarray:
    return (np.arange(LANES)[:, None] * COLUMNS + np.arange(start, start + columns)).reshape(-1)


def dealloc(W: Warp, ins: Instr, L: LaneSet, group: int, address: int, columns: int) -> Park | None:
    """tcgen05.dealloc; for a pair of blocks it waits for the peer's (the ISA permits this)."""
    check_group(W, ins, group)
    _whole_warp(W, ins, L, "dealloc")
    if address >> 16:
        W.fail(MemoryFault, ins, "the address to free has a lane field")
    if group == 2:
        call = _meet(W, ins, ("dealloc", address, columns))
        if not call.met:
            return _wait(W, call, lambda: call.met, "waits for tcgen05.dealloc of the peer block")
    tmem = tmem_of(W.cta)
    owner = tmem.owners.get(address)
    why = tmem.release(address, columns)
    if why:
        W.fail(MemoryFault, ins, why)
    if owner != W.index:
        W.bend("dealloc-warp", SyncError, ins, f"tensor memory allocated by warp {owner} is freed by another warp")
    if tmem.shadow is not None:
        detector, pipe = W.cta.cluster.detector, pipe_of(W)
        # Freeing conflicts with every access that the warp has not synchronised with.
        view = detector.freeing_view(W.agent, *pipe.agents)
        words = _words(address, columns)
        detector.tensor_write(W.agent, view, tmem.shadow, words, W.agent, 0, Where(W, ins))
    return None


def relinquish(W: Warp, ins: Instr, L: LaneSet, group: int) -> Park | None:
    """tcgen05.relinquish_alloc_permit."""
    check_group(W, ins, group)
    _whole_warp(W, ins, L, "relinquish_alloc_permit")
    if group == 2:
        call = _meet(W, ins, ("relinquish_alloc_permit",))
        if not call.met:
            return _wait(W, call, lambda: call.met, "waits for relinquish_alloc_permit of the peer block")
    tmem_of(W.cta).permit = False
    return None
