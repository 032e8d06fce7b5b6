"""Run-time behaviour of cp.async: copies of a warp's lanes, groups, arrivals on mbarriers."""

from __future__ import annotations

import numpy as np

from .asyncops import read_bytes
from .ir import Instr
from .machine import AsyncOp
from .ops_mbar import find, groups
from .warp import _Where

Ctx = "the executing warp (see warp.Warp)"


class CpAsync:
    """cp.async bookkeeping of a warp: issued and finished operations, and group ends."""

    def __init__(self, W: Ctx) -> None:
        self.issued = self.finished = 0
        self.ends: list[int] = []
        detector = W.cta.cluster.detector
        # By the letter of the model cp.async writes through the generic proxy; production kernels rely on less.
        self.agent = detector.new_agent(f"cp.async of {W.name}", W.launch.strict) if detector else 0


def cp_state(W: Ctx) -> CpAsync:
    """Return a warp's cp.async state."""
    if "cp" not in W.state:
        W.state["cp"] = CpAsync(W)
    return W.state["cp"]


def cp_async_copy(
    W: Ctx, L: object, ins: Instr, dst: np.ndarray, src: np.ndarray, size: int, source_size: np.ndarray | None
) -> None:
    """Issue cp.async of ``size`` bytes per lane; bytes past ``source_size`` are zeros."""
    cta, state = W.cta, cp_state(W)
    offset = (dst - cta.shared_base).astype("i8")
    if np.count_nonzero(dst & np.uint32(size - 1)):
        W.misaligned(ins, dst, size, L)
    if int(offset.max()) + size > cta.shared.limit or int(offset.min()) < 0:
        W.out_of_shared(ins, dst, L)
    if np.count_nonzero(src & np.uint64(size - 1)):
        W.misaligned(ins, src, size, L)
    if source_size is None:
        take = np.full(len(dst), size)
    elif source_size.dtype == bool:
        take = np.where(source_size, 0, size)
    else:
        take = np.minimum(source_size.astype("i8"), size)
    state.issued += 1
    clock = state.issued
    detector, shadow = cta.cluster.detector, cta.shadow
    words = (offset[:, None] // 4 + np.arange(size // 4)).reshape(-1)
    if shadow is not None:
        view = detector.V[W.agent]
        detector.async_write(W.agent, view, shadow, words, state.agent, _Where(W, ins))
    code = f"u{size}" if size < 16 else "u4"
    lanes = size // int(code[1:])
    index = (offset[:, None] // int(code[1:]) + np.arange(lanes)).reshape(-1)
    cta.shared.init_view(int(code[1:]))[index] = 0

    def finish() -> None:
        data = np.zeros((len(dst), size), "u1")
        for row, count, address in zip(data, take, src, strict=False):
            if count:
                row[:count] = read_bytes(W, ins, int(address), int(count))
        cta.shared.view(code)[index] = data.view(code).reshape(-1)
        cta.shared.init_view(int(code[1:]))[index] = int.from_bytes(b"\1" * int(code[1:]), "little")
        if shadow is not None:
            detector.finish_write(shadow, words, state.agent, clock)
        state.finished += 1

    cta.cluster.submit(("cp", id(W)), AsyncOp("cp.async", finish))
    W.traffic[5] += int(take.sum())


def cp_async_commit(W: Ctx, L: object) -> None:
    """cp.async.commit_group."""
    state = cp_state(W)
    state.ends.append(state.issued)


def cp_async_wait(W: Ctx, L: object, keep: int | None) -> None:
    """cp.async.wait_group (or wait_all when ``keep`` is None)."""
    state = cp_state(W)
    if keep is None:
        need = state.issued
    elif len(state.ends) > keep:
        need = state.ends[len(state.ends) - 1 - keep]
    else:
        return
    W.cta.cluster.drain(("cp", id(W)), lambda: state.finished >= need)
    detector = W.cta.cluster.detector
    if detector:
        detector.V[W.agent, state.agent] = max(int(detector.V[W.agent, state.agent]), need)


def cp_async_arrive(W: Ctx, L: object, ins: Instr, a: np.ndarray, noinc: bool) -> None:
    """cp.async.mbarrier.arrive: arrive when all prior cp.async of the threads have finished."""
    state = cp_state(W)
    clock = state.issued
    for address, lanes in groups(a):
        barrier = find(W, ins, address, False)
        if not noinc:
            barrier.pending += len(lanes)
            barrier.count += 0

        def finish(barrier: object = barrier, count: int = len(lanes)) -> None:
            barrier.gather_clock(state.agent, clock)
            barrier.arrive(count)

        W.cta.cluster.submit(("cp", id(W)), AsyncOp("cp.async arrive", finish))
