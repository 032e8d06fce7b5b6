"""Emitters of barriers of a block, a warp and a cluster, and of fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..parsing.ir import Imm, Instr
from ..state.warp import Warp
from ..synchronisation.strong import SCOPES
from ..translation.codegen import Codegen, Park
from ..translation.registry import Mods, op
from .mbarrier import fence_mbarriers
from .tensormap_edits import acquire_maps


def _bar_dsts(ins: Instr) -> int:
    return 1 if "red" in ins.mods else 0


def _bar_members(ins: Instr) -> int | None:
    return 0 if "warp" in ins.mods else None


def _bar_aligned(ins: Instr) -> bool:
    """Tell whether all lanes of a warp execute a barrier together: ``bar`` is ``barrier.aligned``."""
    return ins.op == "bar" or "aligned" in ins.mods or "cluster" in ins.mods


@op("bar barrier", "sync", dsts=_bar_dsts, collective=_bar_aligned, members=_bar_members)
def _bar(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("cluster"):
        return _cluster(cg, ins, mods)
    mods.flag("cta")
    mods.flag("aligned")
    if mods.flag("warp"):
        mods.choose("sync")
        mods.args(1)
        return None
    kind = mods.choose("sync", "arrive", "red")
    if kind == "red":
        return _bar_red(cg, ins, mods)
    args = mods.args(2) if kind == "arrive" else mods.args(1, 2)

    def run(
        W: Warp,
        L: LaneSet,
        a: np.ndarray,
        qa: Poison,
        b: np.ndarray | None = None,
        qb: Poison = None,
    ) -> Any:
        index, threads = _uniform(W, ins, L, a, qa, b, qb)
        barrier = W.cta.barrier(index)
        generation = barrier.arrive(W, threads, L, lambda why: W.sync_error(ins, why))
        W.launch.counters["barrier arrivals"] += 1
        if kind == "arrive":
            return None
        return wait_named(W, barrier, generation)

    return cg.call(run, [(each, "u32") for each in args], [])


def wait_named(W: Warp, barrier: Any, generation: int) -> Park | None:
    """Wait for a generation of a named barrier."""

    def ready() -> bool:
        if not barrier.completed(generation):
            return False
        barrier.acquire(W, generation)
        return True

    return None if ready() else Park(ready, f"waits for barrier {barrier.index}")


def _uniform(W: Warp, ins: Instr, L: LaneSet, a: np.ndarray, qa: Poison, b: Any, qb: Poison) -> tuple:
    """Return barrier number and thread count, which must be the same in all lanes."""
    for q in (qa, qb):
        if q is not None:
            W.poisoned(q, ins, "a barrier", L)
    for values in (a, b):
        if values is not None and count_nonzero(values != values[0]):
            W.sync_error(ins, "lanes of one warp name different barriers or counts", L)
    return int(a[0]), None if b is None else int(b[0])


def _bar_red(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.choose("popc", "and", "or")
    result = mods.type("u32") if kind == "popc" else mods.type("pred")
    dst, a, *rest = mods.args(3, 4)
    *count, p = rest

    def run(W: Warp, L: LaneSet, va: np.ndarray, qa: Poison, pred: np.ndarray, qp: Poison, b: Any = None,
            qb: Poison = None) -> Any:  # fmt: skip
        index, threads = _uniform(W, ins, L, va, qa, b, qb)
        if qp is not None:
            W.poisoned(qp, ins, "a barrier reduction", L)
        barrier = W.cta.barrier(index)
        key = ("red", index, W.lane_bits(L))
        held = W.state.pop(key, None)
        if held is None:
            generation = barrier.generation
            barrier.values.append((generation, int(count_nonzero(pred)), len(pred)))
            barrier.arrive(W, threads, L, lambda why: W.sync_error(ins, why))
            W.state[key] = generation
            park = wait_named(W, barrier, generation)
            if park is not None:
                park.redo = True
                return park
            held = W.state.pop(key)
        values = [v for v in barrier.values if v[0] == held]
        true, total = sum(v[1] for v in values), sum(v[2] for v in values)
        if kind == "popc":
            return np.full(len(pred), true, "u4"), None
        return np.full(len(pred), true == total if kind == "and" else true > 0), None

    sources = [(a, "u32"), (p, "pred")] + [(each, "u32") for each in count]
    cg.call(run, sources, [(dst, result)])


def _cluster(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.choose("arrive", "wait")
    sem = mods.choose("release", "relaxed", "acquire", default="release" if kind == "arrive" else "acquire")
    mods.flag("aligned")
    mods.args(0)

    def arrive(W: Warp, L: LaneSet) -> None:
        if "cluster" in W.state:
            W.sync_error(ins, "barrier.cluster.arrive twice without a wait")
        if sem == "release":
            fence_mbarriers(W)
        barrier = W.cta.cluster.barrier
        W.state["cluster"] = barrier.arrive(W, sem == "release", lambda why: W.sync_error(ins, why))

    def wait(W: Warp, L: LaneSet) -> Park | None:
        if "cluster" not in W.state:
            W.sync_error(ins, "barrier.cluster.wait without an arrive")
        barrier = W.cta.cluster.barrier
        generation = W.state.pop("cluster")

        def ready() -> bool:
            if barrier.generation <= generation:
                return False
            detector = W.cta.cluster.detector
            if detector:
                detector.acquire(W.agent, barrier.snapshot)
            # fence.mbarrier_init makes inits visible across even a relaxed cluster barrier.
            for cta in W.cta.cluster.ctas:
                for each in cta.mbarriers.values():
                    if each.fenced:
                        each.seen.add(W.agent)
            return True

        return None if ready() else Park(ready, "waits for the cluster barrier")

    cg.call(arrive if kind == "arrive" else wait, [], [])


@op("membar", "call", dsts=0)
def _membar(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("proxy"):
        return _proxy(cg, ins, mods)
    scope = {"gl": "gpu"}.get(level := mods.choose("cta", "gl", "sys"), level)
    return _fence_call(cg, True, True, scope)


def _fence_call(cg: Codegen, acquire: bool, release: bool, scope: str) -> None:
    """Emit a fence of the generic proxy."""

    def run(W: Warp, L: LaneSet) -> None:
        detector = W.cta.cluster.detector
        if detector:
            detector.flags.fence(W.agent, W.home, acquire, release, scope)

    cg.call(run, [], [])


@op("fence", "call", dsts=0)
def _fence(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("proxy"):
        return _proxy(cg, ins, mods)
    if mods.flag("mbarrier_init"):
        mods.choose("release")
        mods.choose("cluster")
        return cg.call(lambda W, L: fence_mbarriers(W), [], [])
    sem = mods.choose("sc", "acq_rel", "acquire", "release", default="acq_rel")
    mods.flag("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    return _fence_call(cg, sem != "release", sem != "acquire", mods.choose(*SCOPES))


def _proxy(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("tensormap::generic"):
        acquire = mods.choose("release", "acquire") == "acquire"
        mods.choose(*SCOPES)
        if not acquire:
            return None
        address, size = mods.args(2)
        if not isinstance(size, Imm) or size.value != 128:
            mods.fail("a tensor map has 128 bytes")
        return cg.call(lambda W, L, a, qa: acquire_maps(W, a), [(address, "addr64")], [])
    if mods.flag("alias"):
        return None
    both = mods.flag("async::generic")
    if both:
        mods.choose("acquire", "release")
        mods.flag("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        mods.choose("cluster", "cta", default="cluster")
    else:
        mods.choose("async")
    space = mods.choose("global", "shared::cta", "shared::cluster", default="all")

    def run(W: Warp, L: LaneSet) -> None:
        if space != "global":
            fence_mbarriers(W)
        detector = W.cta.cluster.detector
        if detector:
            detector.proxy_fence(W.agent, space != "global", space in ("global", "all"))

    return cg.call(run, [], [])
