"""Run-time behaviour of tensor memory: loads, stores, fences, and what a warp has in flight."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..arithmetic.numeric import LaneSet, count_nonzero
from ..errors import MemoryFault, PoisonError, SyncError
from ..parsing.ir import Instr, Reg
from ..state.accesses import Where
from ..state.machine import AsyncOp
from ..state.warp import Warp
from .pipe import Pipe, pipe_of
from .tmem import COLUMNS, LANES, TensorMemory, fragment, tmem_of


@lru_cache(maxsize=512)
def _columns(shape: str, count: int, split: int, packed: bool) -> np.ndarray:
    """Return the columns of an access, each once."""
    return np.unique(fragment(shape, count, split, packed)[1])


def cells_of(
    W: Warp, ins: Instr, L: LaneSet, taddr: np.ndarray, shape: str, count: int, split: int, packed: bool
) -> tuple[TensorMemory, np.ndarray]:
    """Return tensor memory and the flat cell index [registers, 32, cells] of a warp's access, checked."""
    if L is not None:
        W.fail(SyncError, ins, "tcgen05.ld/st need all 32 lanes of the warp", L)
    if count_nonzero(taddr != taddr[0]):
        W.bend(
            "tmem-lanes",
            SyncError,
            ins,
            "the lanes of a warp give different tensor-memory addresses (the first lane's counts)",
        )
    lane, column = int(taddr[0]) >> 16, int(taddr[0]) & 0xFFFF
    quadrant = 32 * (W.index % 4)
    if lane % 32 not in ((0,) if shape == "32x32b" else (0, 16)) or lane >= LANES:
        W.fail(MemoryFault, ins, f"lane field {lane} is not legal for shape .{shape}")
    if lane // 32 != W.index % 4:
        text = f"lane field {lane} is not in the warp's quadrant {quadrant}..{quadrant + 31}"
        W.bend("tmem-lanes", MemoryFault, ins, text + " (a warp reaches no other lanes)")
        lane = quadrant + lane % 32
    lanes, columns = fragment(shape, count, split, packed)
    tmem = tmem_of(W.cta)
    why = tmem.outside(_columns(shape, count, split, packed) + column)
    if why:
        W.fail(MemoryFault, ins, why)
    return tmem, (lanes + lane) * COLUMNS + columns + column


def load(
    W: Warp,
    ins: Instr,
    L: LaneSet,
    taddr: np.ndarray,
    regs: list[Reg],
    shape: str,
    count: int,
    split: int,
    packed: bool,
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
        detector.tensor_read(W.agent, view, tmem.shadow, words, pipe.agents[1], clock, Where(W, ins))

    def values() -> np.ndarray:
        cells = tmem.cells.reshape(-1)[index]
        return cells[..., 0] if not packed else (cells[..., 0] & 0xFFFF) | cells[..., 1] << np.uint32(16)

    # Nothing may write the cells before the wait, so that their value is known now. It is needed for copies that cannot
    # share the buffer: compilers move instructions that only pack registers ahead of the wait.
    buffer = values()
    pending = np.ones(32, bool)
    masks = [pending] * len(regs)
    early = W.program.early_use(ins) if "ld-wait" in W.launch.allow else None
    if early is not None:
        why = f"it uses registers of the tcgen05.ld in line {ins.line}, and no tcgen05.wait::ld need have run before"
        W.bend("ld-wait", PoisonError, early, why)
        if (release := W.program.early_release(ins)) is not None:
            why = f"it comes after the tcgen05.ld in line {ins.line}, and no tcgen05.wait::ld need have run between"
            W.bend("ld-no-wait", SyncError, release, why)
        masks = [None if row.all() else ~row for row in tmem.defined.reshape(-1)[index].all(2)]
    bad: list[np.ndarray] = []

    def finish() -> None:
        buffer[...] = values()
        undefined = ~tmem.defined.reshape(-1)[index].all(2)
        if undefined.any():
            bad.append(undefined)
        pipe.loads_done = clock

    storage = W.program.cfg.storage
    for reg, row, mask in zip(regs, buffer, masks, strict=False):
        code = storage[reg.index]
        W.R[reg.index] = row if code == "u4" else row.view(code)
        W.Q[reg.index] = mask
    W.cta.cluster.submit(("tcgen05.ld", id(W)), AsyncOp("tcgen05.ld", finish))
    if early is None:
        pipe.pending_loads.append((clock, buffer, pending, bad))
    else:
        W.cta.cluster.drain(("tcgen05.ld", id(W)), lambda: pipe.loads_done >= clock)
        _finished(W, pipe, 1, clock)
    W.traffic[7] += index.size * 4


def store(
    W: Warp,
    ins: Instr,
    L: LaneSet,
    taddr: np.ndarray,
    regs: list[Reg],
    shape: str,
    count: int,
    split: int,
    packed: bool,
) -> None:
    """tcgen05.st."""
    tmem, index = cells_of(W, ins, L, taddr, shape, count, split, packed)
    pipe = pipe_of(W)
    pipe.stores += 1
    clock = pipe.stores
    detector = W.cta.cluster.detector
    if detector:
        view = detector.tensor_view(W.agent, pipe.agents[2])
        words = index.reshape(-1)
        detector.tensor_write(W.agent, view, tmem.shadow, words, pipe.agents[2], clock, Where(W, ins))
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
        for index in W.program.loaded_registers():
            entry = waiting.get(id(Q[index])) if Q[index] is not None else None
            if entry is None:
                continue
            Q[index] = None
            if entry[3]:
                undefined = entry[3][0]
                if R[index].base is entry[1]:
                    mask = undefined[(R[index].ctypes.data - entry[1].ctypes.data) // 128]
                else:  # a packed copy of some of the registers
                    mask = undefined.any(0)
                Q[index] = mask if mask.any() else None
    pipe.pending_loads = []
    _finished(W, pipe, 1, pipe.loads)


def _finished(W: Warp, pipe: Pipe, which: int, clock: int) -> None:
    """Note that the warp's own loads or stores are done: seen by itself now, by others after before_thread_sync."""
    detector = W.cta.cluster.detector
    if detector:
        agent = pipe.agents[which]
        detector.finished(W.agent, agent, clock)
        pipe.unreleased[agent] = clock


def fence_before(W: Warp) -> None:
    """tcgen05.fence::before_thread_sync: later releases publish the finished loads and stores."""
    detector = W.cta.cluster.detector
    if detector:
        for agent, clock in pipe_of(W).unreleased.items():
            detector.learn(W.agent, agent, clock)


def fence_after(W: Warp) -> None:
    """tcgen05.fence::after_thread_sync."""
    detector = W.cta.cluster.detector
    if detector:
        detector.tensor_after(W.agent)
