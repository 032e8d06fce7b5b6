"""Emitters of clusterlaunchcontrol: a running cluster takes over one that has not started."""

from __future__ import annotations

import functools

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison
from ..parsing.ir import Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .bulk_copies import BulkLoad, TensorTarget


def _dsts(ins: Instr) -> int:
    return 1 if "query_cancel" in ins.mods else 0


@op("clusterlaunchcontrol", "sync", dsts=_dsts)
def _clusterlaunchcontrol(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("query_cancel"):
        return _query(cg, ins, mods)
    mods.choose("try_cancel")
    mods.choose("async")
    shared = mods.flag("shared::cta")
    mods.choose("mbarrier::complete_tx::bytes")
    everywhere = mods.flag("multicast::cluster::all")
    mods.type("b128")
    address, barrier = mods.args(2)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, b: np.ndarray, qb: Poison) -> None:
        for q in (qa, qb):
            if q is not None:
                W.poisoned(q, ins, "an address", L)
        mask = (1 << len(W.cta.cluster.ctas)) - 1 if everywhere else None
        for lane in range(len(a)):
            answer = _cancel_one(W)
            into = TensorTarget(int(a[lane]) & 0xFFFFFFFF, int(b[lane]) & 0xFFFFFFFF, mask, 1)
            BulkLoad(W, ins)._submit(into, 16, 16, functools.partial(np.asarray, answer))

    bits = "addr32" if shared else "addr64"
    return cg.call(run, [(address, bits), (barrier, bits)], [])


def _cancel_one(W: Warp) -> np.ndarray:
    """Take the next waiting cluster; return the opaque answer (x, y, z of its first block, and a success word)."""
    words = np.zeros(4, "u4")
    if W.launch.waiting:
        _, ctaids = W.launch.waiting.popleft()
        words[:3], words[3] = ctaids[0], 1
    return words.view("u1")


def _query(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("is_canceled"):
        mods.choose("pred")
        mods.choose("b128")
        dst, handle = mods.args(2)
        return cg.call(lambda W, L, h, q: ((h[:, 1] >> np.uint64(32)) == 1, q), [(handle, "b128")], [(dst, "pred")])
    part = mods.choose("get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z")
    vector = mods.flag("v4")
    mods.choose("b32")
    mods.choose("b128")
    dst, handle = mods.args(2)
    items = list(dst.items) if isinstance(dst, Vec) else [dst]
    if (len(items) == 4) != vector:
        mods.fail("destination form")

    def words(W: Warp, L: LaneSet, h: np.ndarray, q: Poison) -> tuple:
        flat = np.ascontiguousarray(h).view("u4")
        if not vector:
            return flat[:, "xyz".index(part[-1])].copy(), q
        return tuple(x for k in range(4) for x in (flat[:, k].copy(), q))

    return cg.call(words, [(handle, "b128")], [(i, "b32") for i in items])
