"""Emitters of mbarrier instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero, distinct
from ..errors import MemoryFault, RaceError, SyncError
from ..memory.spaces import GENERIC_BASE, RANK_SHIFT, SHARED_RESERVED
from ..parsing.ir import SINK, Addr, Instr
from ..state.warp import Warp
from ..synchronisation.barriers import MBarrier
from ..translation.codegen import Codegen, Park
from ..translation.registry import Mods, op


def _dsts(ins: Instr) -> int:
    if any(m in ins.mods for m in ("test_wait", "try_wait", "pending_count")):
        return 1
    arrive = any(m in ins.mods for m in ("arrive", "arrive_drop"))
    return int(arrive and bool(ins.args) and not isinstance(ins.args[0], Addr))


def fence_mbarriers(W: Warp) -> None:
    """Mark the mbarriers that this warp initialised as visible to asynchronous and remote agents."""
    for barrier in W.state.pop("unfenced", ()):
        barrier.fenced = True


def shared_target(W: Warp, ins: Instr, address: int, remote: bool) -> tuple:
    """Return the block and the byte offset in its window for a shared address."""
    if address >> 40 == GENERIC_BASE["shared"] >> 40:
        address -= GENERIC_BASE["shared"]
    rank = (address - SHARED_RESERVED) >> RANK_SHIFT
    own = W.cta
    if rank == own.rank:
        target = own
    elif not remote:
        W.fail(MemoryFault, ins, f"address {address:#x} is not in the block's own shared memory")
    else:
        target = own.cluster.member(W, ins, rank)
    offset = address - target.shared.base
    if not 0 <= offset < target.shared.limit:
        W.fail(MemoryFault, ins, f"address {address:#x} is outside shared memory")
    return target, offset


def find(W: Warp, ins: Instr, address: int, remote: bool = True, asynchronous: bool = False) -> MBarrier:
    """Return the mbarrier at an address; a missing one, or one not yet visible, is an error."""
    target, offset = shared_target(W, ins, address, remote)
    barrier = target.mbarriers.get(offset)
    if barrier is None:
        W.fail(SyncError, ins, f"there is no initialised mbarrier at shared address {address:#x}")
    if not barrier.fenced and (asynchronous or target is not W.cta):
        W.bend(
            "mbarrier-init-fence",
            SyncError,
            ins,
            f"mbarrier {barrier.name} is used asynchronously or remotely before a fence of its init",
        )
    check_visible(W, ins, barrier)
    return barrier


def check_visible(W: Warp, ins: Instr, barrier: MBarrier) -> None:
    """Raise unless the barrier's initialisation happened before this warp's use of it."""
    if W.agent in barrier.seen:
        return
    detector = W.cta.cluster.detector
    if detector:
        agent, clock = barrier.created
        if clock > detector.knows(W.agent, agent):
            W.fail(RaceError, ins, f"mbarrier {barrier.name} is used without synchronisation after its init")
    barrier.seen.add(W.agent)


def groups(a: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (address, lane positions) for each distinct address."""
    if len(a) == 1 or count_nonzero(a != a[0]) == 0:
        return [(int(a[0]), np.arange(len(a)))]
    return [(v, np.flatnonzero(a == v)) for v in distinct(a)]


def _address_bits(operand: Addr, space: str) -> str:
    return "addr64" if space == "generic" else "addr32"


@op("mbarrier", "sync", dsts=_dsts)
def _mbarrier(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.left.pop(0) if mods.left else ""
    table = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "expect_tx": _tx,
        "complete_tx": _tx,
        "test_wait": _wait,
        "try_wait": _wait,
        "pending_count": _pending_count,
    }
    if kind not in table:
        mods.fail("unknown mbarrier operation")
    table[kind](cg, ins, mods, kind)


def _space(mods: Mods) -> str:
    mods.type("b64")
    return mods.choose("shared", "shared::cta", "shared::cluster", default="generic")


def _init(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    space = _space(mods)
    address, count = mods.args(2)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, n: np.ndarray, qn: Poison) -> None:
        for q in (qa, qn):
            if q is not None:
                W.poisoned(q, ins, "a barrier", L)
        for value, lanes in groups(a):
            cta, offset = shared_target(W, ins, value, False)
            if offset % 8:
                W.fail(MemoryFault, ins, f"mbarrier address {value:#x} is not a multiple of 8")
            if offset in cta.mbarriers:
                check_visible(W, ins, cta.mbarriers[offset])
                W.bend(
                    "mbarrier-init",
                    SyncError,
                    ins,
                    f"mbarrier at {value:#x} is initialised again without mbarrier.inval",
                )
                forget(W, cta.mbarriers[offset])
            if len(lanes) > 1:
                W.bend("mbarrier-init", SyncError, ins, "several lanes initialise the same mbarrier")
            if cta.shadow is not None:
                W.shared_write(cta.shadow, np.array([offset], "u4"), 4, 2, ins)
            barrier = MBarrier(cta, offset, int(n[lanes[0]]))
            detector = cta.cluster.detector
            barrier.created = (W.agent, int(detector.V[W.agent, W.agent])) if detector else (0, 0)
            barrier.seen = {W.agent}
            cta.mbarriers[offset] = barrier
            W.state.setdefault("unfenced", []).append(barrier)
            cta.shared.init[offset : offset + 8] = 0
            if cta.shadow is not None:
                words = np.array([offset // 4, offset // 4 + 1])
                detector.forbid(cta.shadow, words, barrier.agent)

    cg.call(run, [(address, _address_bits(address, space)), (count, "u32")], [])


def forget(W: Warp, barrier: MBarrier) -> None:
    """Make an mbarrier's bytes ordinary memory, written by this warp."""
    del barrier.cta.mbarriers[barrier.offset]
    shadow = barrier.cta.shadow
    if shadow is not None:
        words = np.array([barrier.offset // 4, barrier.offset // 4 + 1])
        shadow.writer[words] = W.agent
        shadow.clock[words] = W.cta.cluster.detector.V[W.agent, W.agent]


def _inval(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    space = _space(mods)
    (address,) = mods.args(1)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> None:
        for value, _ in groups(a):
            forget(W, find(W, ins, value, False))

    cg.call(run, [(address, _address_bits(address, space))], [])


def _arrive(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    drop = kind == "arrive_drop"
    expect = mods.flag("expect_tx")
    no_complete = mods.flag("noComplete")
    sem = mods.choose("release", "relaxed", default="release")
    scope = mods.choose("cta", "cluster", default="cta")
    space = _space(mods)
    args = list(ins.args)
    state = SINK if isinstance(args[0], Addr) else args.pop(0)
    address, *rest = args
    if len(rest) > 1 or (expect and not rest):
        mods.fail("bad operands")
    remote = space == "shared::cluster"
    if remote and state is not SINK:
        mods.fail("a remote arrive returns no state")

    def run(
        W: Warp,
        L: LaneSet,
        a: np.ndarray,
        qa: Poison,
        n: np.ndarray | None = None,
        qn: Poison = None,
    ) -> Any:
        for q in (qa, qn):
            if q is not None:
                W.poisoned(q, ins, "a barrier", L)
        out = np.zeros(len(a), "u8")
        for value, lanes in groups(a):
            barrier = find(W, ins, value, remote)
            if sem == "release":
                barrier.gather(W.agent)
            elif detector := W.cta.cluster.detector:
                barrier.gather_known(detector.flags.fenced(W.agent, scope))
            for lane in lanes:
                phase = barrier.phase
                out[lane] = phase << 32 | barrier.pending
                try:
                    if expect:
                        barrier.expect(int(n[lane]))
                        barrier.arrive(1, drop)
                    else:
                        barrier.arrive(1 if n is None else int(n[lane]), drop)
                except SyncError as error:
                    W.fail(SyncError, ins, str(error))
                if no_complete and barrier.phase != phase:
                    W.sync_error(ins, "an arrive.noComplete completed the phase")
        W.launch.counters["mbarrier arrivals"] += len(a)
        return (out, None) if state is not SINK else None

    sources = [(address, _address_bits(address, space))] + [(each, "u32") for each in rest]
    cg.call(run, sources, [] if state is SINK else [(state, "b64")])


def _tx(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    mods.choose("relaxed", default="relaxed")
    mods.choose("cta", "cluster", default="cta")
    space = _space(mods)
    address, size = mods.args(2)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, n: np.ndarray, qn: Poison) -> None:
        for q in (qa, qn):
            if q is not None:
                W.poisoned(q, ins, "a barrier", L)
        for lane in range(len(a)):
            barrier = find(W, ins, int(a[lane]), space == "shared::cluster")
            barrier.expect(int(n[lane])) if kind == "expect_tx" else barrier.complete_tx(int(n[lane]))

    cg.call(run, [(address, _address_bits(address, space)), (size, "u32")], [])


_TRUE, _FALSE = np.ones(32, bool), np.zeros(32, bool)


def _wait(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    parity = mods.flag("parity")
    sem = mods.choose("acquire", "relaxed", default="acquire")
    mods.choose("cta", "cluster", default="cta")
    space = _space(mods)
    dst, address, token, *hint = mods.args(3, 4)
    type_name = "u32" if parity else "b64"

    def run(
        W: Warp,
        L: LaneSet,
        a: np.ndarray,
        qa: Poison,
        t: np.ndarray,
        qt: Poison,
        *_: Any,
    ) -> Any:
        for q in (qa, qt):
            if q is not None:
                W.poisoned(q, ins, "a barrier", L)
        size = len(a)
        result = np.empty(size, bool)
        held = []
        for value, lanes in groups(a):
            barrier = find(W, ins, value, False)
            barrier.waits += 1
            for wanted in {int(x) for x in t[lanes]}:
                passed = barrier.passed(wanted & 1) if parity else barrier.phase > wanted >> 32
                if passed and W.launch.random and W.launch.rng.random() < 0.02:
                    passed = False  # A spurious false is legal.
                elif passed:
                    barrier.acquire(W.agent, sem == "acquire")
                elif not passed:
                    held.append((barrier, wanted, barrier.phase))
                result[lanes] = np.where(t[lanes] == wanted, passed, result[lanes])
        fragment = W.current
        if result.all() or not held:
            fragment.last_wait = None
            return result, None
        key = (id(ins), tuple((id(b), w, p) for b, w, p in held))
        if fragment.last_wait == key:
            fragment.last_wait = None
            watch = [(b, p) for b, _, p in held]
            first, parity_of = held[0][:2]
            return Park(
                lambda: any(b.phase != p for b, p in watch),
                lambda: f"waits for parity {parity_of & 1} of {first.state()}",
                True,
                f"mbarrier at shared byte {first.offset}",
            )
        fragment.last_wait = key
        return result, None

    sources = [(address, _address_bits(address, space)), (token, type_name)] + [(each, "u32") for each in hint]
    cg.call(run, sources, [(dst, "pred")])


def _pending_count(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    mods.type("b64")
    dst, state = mods.args(2)
    cg.call(lambda W, L, s, qs: ((s & np.uint64(0xFFFFFFFF)).astype("u4"), qs), [(state, "b64")], [(dst, "u32")])
