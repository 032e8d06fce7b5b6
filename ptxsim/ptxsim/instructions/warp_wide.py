"""Emitters of warp collectives: shfl, vote, match, redux, elect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero, distinct, filled
from ..parsing.ir import SINK, Instr, Pair
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op

_LANES = np.arange(32)


def _last_mask(ins: Instr) -> int:
    return len(ins.args) - 1


def _is_sync(ins: Instr) -> bool:
    return "sync" in ins.mods


def shuffle_sources(mode: str, b: np.ndarray, c: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the source lane of every lane, and whether it is in range (ISA: shfl.sync)."""
    amount, clamp, segment = b & 31, c & 31, c >> 8 & 31
    high = (lane & segment) | (clamp & ~segment)
    low = lane & segment
    if mode == "up":
        source = lane - amount
        valid = source >= high
    elif mode == "down":
        source = lane + amount
        valid = source <= high
    elif mode == "bfly":
        source = lane ^ amount
        valid = source <= high
    else:
        source = low | (amount & ~segment)
        valid = source <= high
    return np.where(valid, source, lane), valid


@op("shfl", "call", collective=_is_sync, members=_last_mask)
def _shfl(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("sync")
    mode = mods.choose("up", "down", "bfly", "idx")
    mods.type("b32")
    dst, a, b, c, mask = mods.args(5)
    cache: dict[bytes, tuple] = {}

    def plan(L: LaneSet, vb: np.ndarray, vc: np.ndarray) -> tuple:
        lane = _LANES if L is None else L
        key = vb.tobytes() + vc.tobytes() + (b"" if L is None else L.tobytes())
        found = cache.get(key)
        if found is None:
            source, valid = shuffle_sources(mode, vb.astype("i8"), vc.astype("i8"), lane)
            position = np.full(32, -1)
            position[lane] = np.arange(len(lane))
            where = position[source]
            missing = where < 0
            found = (np.where(missing, 0, where), valid, missing if missing.any() else None)
            if len(cache) < 4096:
                cache[key] = found
        return found

    def run(W: Warp, L: LaneSet, v: np.ndarray, qv: Poison, vb: np.ndarray, qb: Poison, vc: np.ndarray, qc: Poison,
            m: np.ndarray, qm: Poison) -> tuple:  # fmt: skip
        check_members(W, ins, L, m, (qb, qc, qm))
        where, valid, missing = plan(L, vb, vc)
        poison = missing
        if qv is not None:
            moved = qv[where]
            poison = moved if missing is None else moved | missing
        return v[where], poison, valid, None

    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    cg.call(run, [(a, "b32"), (b, "b32"), (c, "b32"), (mask, "b32")], [(first, "b32"), (second, "pred")])


def check_members(W: Warp, ins: Instr, L: LaneSet, m: np.ndarray, poisons: tuple = ()) -> None:
    """Raise unless every executing lane is in the member mask."""
    for q in poisons:
        if q is not None:
            W.poisoned(q, ins, "a lane selection", L)
    if L is None and m[0] == 0xFFFFFFFF and m[31] == 0xFFFFFFFF:
        return
    lanes = _LANES if L is None else L
    bad = (m >> lanes.astype("u4") & 1) == 0
    if count_nonzero(bad):
        W.sync_error(ins, "an executing lane is not in its own member mask", lanes[bad])


def by_mask(ins: Instr, run: Callable[..., tuple]) -> Callable[..., tuple]:
    """`run` once for the lanes of each member mask: lanes that pass different masks are groups of their own.

    The mask and its poison are the last two of what `run` takes.
    """

    def grouped(W: Warp, L: LaneSet, *given: np.ndarray | None) -> tuple:
        m = given[-2]
        if not count_nonzero(m != m[0]):
            return run(W, L, *given)
        lanes = _LANES if L is None else L
        made: list[Any] = []
        for mask in distinct(m):
            mine = m == mask
            named = (mask >> lanes.astype("u4") & 1) != 0
            if count_nonzero(named & ~mine):
                W.sync_error(ins, "a lane that is in another's member mask has another mask", lanes[named & ~mine])
            part = run(W, lanes[mine], *(None if x is None else x[mine] for x in given))
            made = made or [None] * len(part)
            for at, x in enumerate(part):
                if x is not None:
                    made[at] = np.zeros(len(lanes), x.dtype) if made[at] is None else made[at]
                    made[at][mine] = x
        return tuple(made)

    return grouped


@op("vote", "call", collective=_is_sync, members=_last_mask)
def _vote(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("sync")
    kind = mods.choose("all", "any", "uni", "ballot")
    result = mods.type("pred", "b32")
    dst, a, mask = mods.args(3)

    def run(W: Warp, L: LaneSet, p: np.ndarray, qp: Poison, m: np.ndarray, qm: Poison) -> tuple:
        check_members(W, ins, L, m, (qm,))
        count, size = count_nonzero(p), len(p)
        poison = None
        if qp is not None and count_nonzero(qp):
            poison = np.ones(size, bool)
        if kind == "ballot":
            lanes = _LANES if L is None else L
            bits = int((p.astype("u8") << lanes.astype("u8")).sum())
            return filled(size, bits, "u4"), poison
        truth = {"all": count == size, "any": count > 0, "uni": count in (0, size)}[kind]
        return filled(size, truth, bool), poison

    cg.call(by_mask(ins, run), [(a, "pred"), (mask, "b32")], [(dst, result)])


@op("match", "call", collective=_is_sync, members=_last_mask)
def _match(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.choose("any", "all")
    mods.choose("sync")
    type_name = mods.type("b32", "b64")
    dst, a, mask = mods.args(3)

    def run(W: Warp, L: LaneSet, v: np.ndarray, qv: Poison, m: np.ndarray, qm: Poison) -> tuple:
        check_members(W, ins, L, m, (qv, qm))
        lanes = (_LANES if L is None else L).astype("u8")
        equal = v[:, None] == v[None, :]
        masks = (equal.astype("u8") << lanes[None, :]).sum(1, dtype="u8").astype("u4")
        if kind == "any":
            return masks, None, np.zeros(len(v), bool), None
        same = bool(equal.all())
        return (masks if same else np.zeros(len(v), "u4")), None, filled(len(v), same, bool), None

    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    cg.call(by_mask(ins, run), [(a, type_name), (mask, "b32")], [(first, "b32"), (second, "pred")])


_REDUX = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@op("redux", "call", collective=_is_sync, members=_last_mask)
def _redux(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("sync")
    kind = mods.choose(*_REDUX)
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    type_name = mods.type("u32", "s32", "b32", "f32")
    dst, a, mask = mods.args(3)
    reduce = _REDUX[kind].reduce
    if type_name == "f32":
        if kind not in ("min", "max"):
            mods.fail(".f32 reduces with .min or .max")
        pick = {("min", False): np.fmin, ("max", False): np.fmax}.get((kind, nan), _REDUX[kind])
        reduce = pick.reduce

    def run(W: Warp, L: LaneSet, v: np.ndarray, qv: Poison, m: np.ndarray, qm: Poison) -> tuple:
        check_members(W, ins, L, m, (qm,))
        poison = np.ones(len(v), bool) if qv is not None and count_nonzero(qv) else None
        value = reduce(np.abs(v) if absolute else v)
        return filled(len(v), value, v.dtype), poison

    cg.call(by_mask(ins, run), [(a, type_name), (mask, "b32")], [(dst, type_name)])


def elected(W: Warp, lanes: np.ndarray) -> int:
    """Return the leader of some lanes: any is legal, but always the same; ``elect="random"`` draws one."""
    if W.launch.elect == "lowest":
        return int(lanes[0])
    table, key = W.launch.elected, lanes.tobytes()
    if key not in table:
        table[key] = int(W.launch.rng.choice(lanes))
    return table[key]


@op("elect", "call", collective=_is_sync, members=_last_mask)
def _elect(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.choose("sync")
    dst, mask = mods.args(2)

    def run(W: Warp, L: LaneSet, m: np.ndarray, qm: Poison) -> tuple:
        check_members(W, ins, L, m, (qm,))
        lanes = _LANES if L is None else L
        leader = elected(W, lanes)
        return filled(len(lanes), leader, "u4"), None, lanes == leader, None

    cg.call(by_mask(ins, run), [(mask, "b32")], [(dst.first, "b32"), (dst.second, "pred")])
