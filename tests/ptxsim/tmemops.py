"""Run-time behaviour of tensor memory: allocation, loads, stores, fences, and what a warp has in flight."""

from __future__ import annotations

import numpy as np

from .codegen import Park
from .errors import MemoryFault, SyncError
from .ir import Instr, Reg
from .machine import AsyncOp
from .ops_mbar import shared_target
from .tmem import COLUMNS, LANES, TensorMemory, fragment, tmem_of
from .warp import Warp, _Where


class Pipe:
    """What a warp has issued to the tensor core, and its loads and stores in flight."""

    def __init__(self, W: Warp) -> None:
        self.issued = self.loads = self.stores = 0
        self.loads_done = self.stores_done = 0
        self.pending_loads: list[tuple] = []
        self.unreleased: dict[int, int] = {}
        self.flight: list[tuple[int, int, int, int, int, tuple]] = []
        detector = W.cta.cluster.detector
        if detector:
            names = ("tcgen05 pipe", "tcgen05.ld", "tcgen05.st")
            self.agents = tuple(detector.new_agent(f"{name} of {W.name}", False) for name in names)


def pipe_of(W: Warp) -> Pipe:
    """Return a warp's tensor-core state."""
    if "tcgen05" not in W.state:
        W.state["tcgen05"] = Pipe(W)
    return W.state["tcgen05"]


def check_group(W: Warp, ins: Instr, group: int) -> None:
    """All tcgen05 instructions of a kernel use one .cta_group."""
    used = W.cta.launch.counters.setdefault("tcgen05 cta_group", group)
    if used != group:
        W.bend(SyncError, ins, f".cta_group::{group} after .cta_group::{used}: a kernel must use only one of them")


def pair(W: Warp, ins: Instr, group: int) -> list:
    """Return the block, or the two blocks of the pair in rank order."""
    if group == 1:
        return [W.cta]
    low = W.cta.rank & ~1
    return [W.cta.cluster.member(W, ins, low), W.cta.cluster.member(W, ins, low + 1)]


# ---- allocation ----------------------------------------------------------------------------------------------------
def alloc(W: Warp, ins: Instr, L: object, group: int, address: int, columns: int) -> Park | None:
    """tcgen05.alloc: write the address of free columns to shared memory, waiting until there are some."""
    check_group(W, ins, group)
    if L is not None:
        W.fail(SyncError, ins, "tcgen05.alloc needs all 32 lanes of the warp")
    if columns not in (32, 64, 128, 256, 512):
        W.fail(MemoryFault, ins, f"{columns} columns: the count must be a power of two in 32..512")
    tmem = tmem_of(W.cta)
    if not tmem.permit:
        W.fail(SyncError, ins, "tcgen05.alloc after relinquish_alloc_permit")
    start = tmem.place(columns)
    if start is None:
        return Park(lambda: tmem.place(columns) is not None, f"waits for {columns} tensor-memory columns", redo=True)
    tmem.take(start, columns)
    tmem.groups = {**getattr(tmem, "groups", {}), start: W.index}
    cta, offset = shared_target(W, ins, address, False)
    if offset % 4:
        W.fail(MemoryFault, ins, "the address for tcgen05.alloc is not a multiple of 4")
    if cta.shadow is not None:
        W.shared_write(cta.shadow, np.array([offset], "u4"), 4, 1, ins)
    cta.shared.view("u4")[offset // 4] = start
    cta.shared.init[offset : offset + 4] = 1
    if tmem.shadow is not None:
        detector = cta.cluster.detector
        words = (np.arange(LANES)[:, None] * COLUMNS + np.arange(start, start + columns)).reshape(-1)
        # Whoever uses the columns must have synchronised with the allocation.
        tmem.shadow.writer[words] = W.agent
        tmem.shadow.clock[words] = detector.V[W.agent, W.agent]
        detector.T[W.agent, W.agent] = detector.V[W.agent, W.agent]
    return None


def dealloc(W: Warp, ins: Instr, L: object, group: int, address: int, columns: int) -> None:
    """tcgen05.dealloc."""
    check_group(W, ins, group)
    if L is not None:
        W.fail(SyncError, ins, "tcgen05.dealloc needs all 32 lanes of the warp")
    tmem = tmem_of(W.cta)
    if address >> 16:
        W.fail(MemoryFault, ins, "the address to free has a lane field")
    owner = getattr(tmem, "groups", {}).get(address)
    why = tmem.release(address, columns)
    if why:
        W.fail(MemoryFault, ins, why)
    if owner != W.index:
        W.bend(SyncError, ins, f"tensor memory allocated by warp {owner} is freed by another warp")
    if tmem.shadow is not None:
        detector, pipe = W.cta.cluster.detector, pipe_of(W)
        words = (np.arange(LANES)[:, None] * COLUMNS + np.arange(address, address + columns)).reshape(-1)
        # Freeing conflicts with every access that the warp has not synchronised with.
        view = np.maximum(detector.tensor_view(W.agent, *pipe.agents), detector.V[W.agent])
        detector.tensor_write(W.agent, view, tmem.shadow, words, W.agent, 0, _Where(W, ins))


def relinquish(W: Warp, ins: Instr, group: int) -> None:
    """tcgen05.relinquish_alloc_permit."""
    check_group(W, ins, group)
    tmem_of(W.cta).permit = False


# ---- loads and stores ----------------------------------------------------------------------------------------------
def cells_of(
    W: Warp, ins: Instr, L: object, taddr: np.ndarray, shape: str, count: int, split: int, packed: bool
) -> tuple[TensorMemory, np.ndarray]:
    """Return tensor memory and the flat cell index [registers, 32, cells] of a warp's access, checked."""
    if L is not None:
        W.fail(SyncError, ins, "tcgen05.ld/st need all 32 lanes of the warp", L)
    if np.count_nonzero(taddr != taddr[0]):
        W.fail(SyncError, ins, "the lanes of a warp give different tensor-memory addresses")
    lane, column = int(taddr[0]) >> 16, int(taddr[0]) & 0xFFFF
    quadrant = 32 * (W.index % 4)
    legal = lane == quadrant if shape == "32x32b" else lane in (quadrant, quadrant + 16)
    if not legal:
        text = f"lane field {lane} is not in the warp's quadrant {quadrant}..{quadrant + 31}"
        if lane not in (0, 16):
            W.fail(MemoryFault, ins, text)
        W.bend(MemoryFault, ins, text + " (the hardware adds the quadrant)")
        lane += quadrant
    lanes, columns = fragment(shape, count, split, packed)
    tmem = tmem_of(W.cta)
    why = tmem.outside(np.unique(columns + column))
    if why:
        W.fail(MemoryFault, ins, why)
    return tmem, (lanes + lane) * COLUMNS + columns + column


def load(
    W: Warp, ins: Instr, L: object, taddr: np.ndarray, regs: list[Reg], shape: str, count: int, split: int, packed: bool
) -> None:
    """tcgen05.ld: registers are poison until tcgen05.wait::ld."""
    tmem, index = cells_of(W, ins, L, taddr, shape, count, split, packed)
    pipe = pipe_of(W)
    pipe.loads += 1
    clock = pipe.loads
    detector = W.cta.cluster.detector
    if detector:
        view = detector.tensor_view(W.agent, pipe.agents[1])
        words = index.reshape(-1)
        detector.tensor_read(W.agent, view, tmem.shadow, words, pipe.agents[1], clock, _Where(W, ins))
    buffer = np.full((len(regs), 32), 0xFFFFFFFF, "u4")
    pending = np.ones(32, bool)
    bad: list[np.ndarray] = []

    def finish() -> None:
        cells = tmem.cells.reshape(-1)[index]
        buffer[...] = cells[..., 0] if not packed else (cells[..., 0] & 0xFFFF) | cells[..., 1] << np.uint32(16)
        undefined = ~tmem.defined.reshape(-1)[index].all(2)
        if undefined.any():
            bad.append(undefined)
        pipe.loads_done = clock

    storage = W.program.cfg.storage
    for reg, row in zip(regs, buffer, strict=False):
        code = storage[reg.index]
        W.R[reg.index] = row if code == "u4" else row.view(code)
        W.Q[reg.index] = pending
    pipe.pending_loads.append((clock, buffer, pending, bad))
    W.cta.cluster.submit(("tcgen05.ld", id(W)), AsyncOp("tcgen05.ld", finish))
    W.traffic[7] += index.size * 4


def store(
    W: Warp, ins: Instr, L: object, taddr: np.ndarray, regs: list[Reg], shape: str, count: int, split: int, packed: bool
) -> None:
    """tcgen05.st."""
    tmem, index = cells_of(W, ins, L, taddr, shape, count, split, packed)
    pipe = pipe_of(W)
    pipe.stores += 1
    clock = pipe.stores
    detector = W.cta.cluster.detector
    if detector:
        view = detector.tensor_view(W.agent, pipe.agents[2], pipe.agents[1])
        view[pipe.agents[1]] = pipe.loads_done
        words = index.reshape(-1)
        detector.tensor_write(W.agent, view, tmem.shadow, words, pipe.agents[2], clock, _Where(W, ins))
    values = np.stack([W.R[r.index].view("u4") for r in regs])
    masks = [W.Q[r.index] for r in regs]
    clean = np.stack([np.ones(32, bool) if m is None else ~m for m in masks])

    def finish() -> None:
        flat, defined = tmem.cells.reshape(-1), tmem.defined.reshape(-1)
        if packed:
            flat[index[..., 0]] = values & 0xFFFF
            flat[index[..., 1]] = values >> np.uint32(16)
        else:
            flat[index[..., 0]] = values
        defined[index] = clean[..., None]
        pipe.stores_done = clock

    W.cta.cluster.submit(("tcgen05.st", id(W)), AsyncOp("tcgen05.st", finish))
    W.traffic[7] += index.size * 4


def wait(W: Warp, ins: Instr, kind: str) -> None:
    """tcgen05.wait::ld or wait::st."""
    pipe = pipe_of(W)
    if kind == "wait::st":
        W.cta.cluster.drain(("tcgen05.st", id(W)), lambda: pipe.stores_done >= pipe.stores)
        _finished(W, pipe, 2, pipe.stores)
        return
    W.cta.cluster.drain(("tcgen05.ld", id(W)), lambda: pipe.loads_done >= pipe.loads)
    waiting = {id(p[2]): p for p in pipe.pending_loads}
    if waiting:
        Q, R = W.Q, W.R
        for index in W.program.inflight_registers():
            entry = waiting.get(id(Q[index])) if Q[index] is not None else None
            if entry is None:
                continue
            Q[index] = None
            if entry[3]:
                row = (R[index].ctypes.data - entry[1].ctypes.data) // 128
                mask = entry[3][0][row]
                Q[index] = mask if mask.any() else None
    pipe.pending_loads = []
    _finished(W, pipe, 1, pipe.loads)


def _finished(W: Warp, pipe: Pipe, which: int, clock: int) -> None:
    """Note that the warp's own loads or stores are done: seen by itself now, by others after before_thread_sync."""
    detector = W.cta.cluster.detector
    if detector:
        agent = pipe.agents[which]
        detector.T[W.agent, agent] = max(int(detector.T[W.agent, agent]), clock)
        pipe.unreleased[agent] = clock
        if not W.launch.strict:
            fence_before(W)


def fence_before(W: Warp) -> None:
    """tcgen05.fence::before_thread_sync: later releases publish the finished loads and stores."""
    detector = W.cta.cluster.detector
    if detector:
        for agent, clock in pipe_of(W).unreleased.items():
            detector.V[W.agent, agent] = max(int(detector.V[W.agent, agent]), clock)


def fence_after(W: Warp) -> None:
    """tcgen05.fence::after_thread_sync."""
    detector = W.cta.cluster.detector
    if detector:
        detector.tensor_after(W.agent)
