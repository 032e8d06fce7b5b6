"""Emitters of asynchronous copies: cp.async, cp.async.bulk (and tensor), cp.reduce, st.async, red.async."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero, distinct
from ..errors import MemoryFault
from ..memory.spaces import RANK_SHIFT, SHARED_RESERVED
from ..parsing.ir import TYPE_BITS, Addr, Imm, Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .bulk_copies import (
    BulkLoad,
    BulkStore,
    TensorTarget,
    commit_bulk,
    copy_shared_to_shared,
    st_async_together,
    wait_bulk,
)
from .cp_async import cp_async_arrive, cp_async_commit, cp_async_copy, cp_async_wait
from .mbarrier import shared_target

_IM2COL, _WIDE = ("im2col", "im2col_no_offs"), ("im2col::w", "im2col::w::128")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@op("cp", "sync", dsts=0)
def _cp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    reduce = mods.flag("reduce")
    mods.choose("async")
    if not mods.flag("bulk"):
        if reduce:
            mods.fail("cp.reduce.async needs .bulk")
        return _cp_async(cg, ins, mods)
    if mods.flag("commit_group"):
        return cg.call(commit_bulk, [], [])
    if mods.flag("wait_group"):
        read = mods.flag("read")
        (count,) = mods.args(1)
        return cg.call(lambda W, L: wait_bulk(W, L, count.value, read), [], [])
    if mods.flag("prefetch"):
        return _prefetch(cg, ins, mods)
    if mods.flag("tensor"):
        return _tensor(cg, ins, mods, reduce)
    return _bulk(cg, ins, mods, reduce)


def _prefetch(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit a prefetch into L2, which has no effect; a plain prefetch needs valid bytes."""
    tensor, hint = mods.flag("tensor"), mods.flag("L2::cache_hint")
    for name in ("L2", "global", "tile", "tile::gather4", *_IM2COL, *_WIDE, *(f"{n}d" for n in range(1, 6))):
        mods.flag(name)
    if tensor:
        return None
    address, size = mods.args(3 if hint else 2)[:2]

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, n: np.ndarray, qn: Poison) -> None:
        _clean(W, L, ins, (qa, qn))
        for at, count in zip(a.tolist(), n.tolist(), strict=True):
            if at % 16 or count % 16:
                W.fault(ins, f"address {at:#x} and size {count} must be multiples of 16", L)
            try:
                W.memory.slice(at, count)
            except MemoryFault as error:
                W.fault(ins, str(error), L)

    return cg.call(run, [(address, "addr64"), (size, "u32")], [])


def _cp_async(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if mods.flag("commit_group"):
        return cg.call(cp_async_commit, [], [])
    if mods.flag("wait_all"):
        return cg.call(lambda W, L: cp_async_wait(W, L, None), [], [])
    if mods.flag("wait_group"):
        (count,) = mods.args(1)
        return cg.call(lambda W, L: cp_async_wait(W, L, count.value), [], [])
    if mods.flag("mbarrier"):
        mods.choose("arrive")
        noinc = mods.flag("noinc")
        space = mods.choose("shared", "shared::cta", default="generic")
        mods.type("b64")
        (address,) = mods.args(1)
        bits = "addr64" if space == "generic" else "addr32"
        return cg.call(lambda W, L, a, qa: cp_async_arrive(W, L, ins, a, noinc), [(address, bits)], [])
    mods.choose("ca", "cg")
    mods.choose("shared", "shared::cta")
    mods.choose("global")
    hint = mods.flag("L2::cache_hint")
    mods.flag("L2::64B", "L2::128B", "L2::256B")
    args = list(ins.args)
    if hint:
        args.pop()
    dst, src, size, *rest = args
    if size.value not in (4, 8, 16):
        mods.fail("the copy size must be 4, 8 or 16")

    def run(W: Warp, L: LaneSet, d: np.ndarray, qd: Poison, s: np.ndarray, qs: Poison, n: Any = None,
            qn: Poison = None) -> None:  # fmt: skip
        for q in (qd, qs, qn):
            if q is not None:
                W.poisoned(q, ins, "an address", L)
        cp_async_copy(W, L, ins, d, s, size.value, n)

    kind = "u32"
    if rest and not isinstance(rest[0], Imm) and getattr(rest[0], "type", "") == "pred":
        kind = "pred"
    return cg.call(run, [(dst, "addr32"), (src, "addr64")] + [(r, kind) for r in rest], [])


def _cluster_mods(mods: Mods) -> tuple[bool, bool, int]:
    multicast = mods.flag("multicast::cluster")
    hint = mods.flag("L2::cache_hint")
    group = int(mods.choose("cta_group::1", "cta_group::2", default="cta_group::1")[-1])
    return multicast, hint, group


def _tensor(cg: Codegen, ins: Instr, mods: Mods, reduce: bool) -> None:
    rank = int(mods.choose("1d", "2d", "3d", "4d", "5d")[0])
    # Some emitters write .cta_group before the destination space.
    pair = next((m for m in mods.left if m.startswith("cta_group")), None)
    if pair is not None:
        mods.left.remove(pair)
        mods.left.append(pair)
    for name in _WIDE:
        if name in mods.left:
            mods.fail(f"{name} is not modelled")
    mode = mods.choose(*_IM2COL, "tile", "tile::gather4", "tile::scatter4", default="tile")
    if not {"shared::cluster", "shared::cta"} & set(mods.left) or "global" not in mods.left:
        mods.fail("needs .global and a shared state space")
    loading = mods.left.index("global") > 0
    if mode in (("im2col_no_offs", "tile::scatter4") if loading else ("im2col", "tile::gather4")):
        mods.fail(f".{mode} is not a mode of this direction")
    if reduce and mode == "tile::scatter4":
        mods.fail("reductions have no .tile::scatter4")
    mods.choose("shared::cluster", "shared::cta")
    mods.choose("global")
    coords = 5 if mode in ("tile::gather4", "tile::scatter4") else rank
    if mode in _IM2COL and rank < 3:
        mods.fail("im2col needs three dimensions or more")
    if not loading:
        return _tensor_store(cg, ins, mods, mode, coords, reduce)
    if reduce:
        mods.fail("cp.reduce writes to global memory only")
    return _tensor_load(cg, ins, mods, mode, coords)


def _tensor_store(cg: Codegen, ins: Instr, mods: Mods, mode: str, coords: int, reduce: bool) -> None:
    reduction = mods.choose(*_REDUCTIONS) if reduce else None
    mods.choose("bulk_group")
    hint = mods.flag("L2::cache_hint")
    target, source, *_ = mods.args(3 if hint else 2)
    _check_coords(mods, target, coords)

    def store(
        W: Warp,
        L: LaneSet,
        m: np.ndarray,
        qm: Poison,
        s: np.ndarray,
        qs: Poison,
        *c: Any,
    ) -> None:
        _clean(W, L, ins, (qm, qs, *c[1::2]))
        for lane in range(len(m)):
            place = tuple(int(x[lane]) for x in c[::2])
            BulkStore(W, ins, _lane(L, lane)).tensor(int(m[lane]), place, int(s[lane]), reduction, mode)

    sources = [(Addr(target.base, target.offset), "addr64"), (source, "addr32")]
    return cg.call(store, sources + [(c, "s32") for c in target.parts[0].items], [])


def _tensor_load(cg: Codegen, ins: Instr, mods: Mods, mode: str, coords: int) -> None:
    mods.choose("mbarrier::complete_tx::bytes")
    multicast, hint, group = _cluster_mods(mods)
    offsets = coords - 2 if mode == "im2col" else 0
    dst, source, barrier, *rest = mods.args(3 + (offsets > 0) + multicast + hint)
    _check_coords(mods, source, coords)
    shifts = list(rest.pop(0).items) if offsets and isinstance(rest[0], Vec) else []
    if len(shifts) != offsets:
        mods.fail(f"expected {offsets} im2col offsets")

    def load(W: Warp, L: LaneSet, d: np.ndarray, qd: Poison, m: np.ndarray, qm: Poison, b: np.ndarray, qb: Poison,
             *c: Any) -> None:  # fmt: skip
        values, masks = list(c[::2]), c[1::2]
        _clean(W, L, ins, (qd, qm, qb, *masks))
        mask = values.pop() if multicast else None
        for lane in range(len(d)):
            place = tuple(int(x[lane]) for x in values)
            into = TensorTarget(int(d[lane]), int(b[lane]), None if mask is None else int(mask[lane]), group)
            BulkLoad(W, ins).tensor(into, int(m[lane]), place[:coords], mode, place[coords:])

    sources = [(dst, "addr32"), (Addr(source.base, source.offset), "addr64"), (barrier, "addr32")]
    sources += [(c, "s32") for c in source.parts[0].items] + [(c, "u16") for c in shifts]
    if multicast:
        sources.append((rest[0], "u16"))
    return cg.call(load, sources, [])


def _check_coords(mods: Mods, operand: Any, count: int) -> None:
    if not isinstance(operand, Addr) or len(operand.parts) != 1 or not isinstance(operand.parts[0], Vec):
        mods.fail("expected [tensorMap, {coordinates}]")
    if len(operand.parts[0].items) != count:
        mods.fail(f"expected {count} coordinates")


def _lane(L: LaneSet, index: int) -> int:
    return index if L is None else int(L[index])


def _clean(W: Warp, L: LaneSet, ins: Instr, masks: tuple) -> None:
    for q in masks:
        if q is not None:
            W.poisoned(q, ins, "an asynchronous copy's operands", L)


def _bulk(cg: Codegen, ins: Instr, mods: Mods, reduce: bool) -> None:
    dst_space = mods.left.pop(0) if mods.left else ""
    if dst_space not in ("shared::cluster", "shared::cta", "global"):
        mods.fail("unknown destination space")
    if dst_space == "global":
        mods.choose("shared::cta")
        mods.choose("bulk_group")
        reduction = mods.choose(*_REDUCTIONS) if reduce else None
        mods.flag("noftz")
        type_name = mods.type() if reduce else "b8"
        hint, masked = mods.flag("L2::cache_hint"), mods.flag("cp_mask") and not reduce
        dst, src, size, *rest = mods.args(3 + hint + masked)

        def store(W: Warp, L: LaneSet, d: np.ndarray, qd: Poison, s: np.ndarray, qs: Poison, n: np.ndarray, qn: Poison,
                  m: np.ndarray | None = None, qm: Poison = None) -> None:  # fmt: skip
            _clean(W, L, ins, (qd, qs, qn, qm))
            for lane in range(len(d)):
                copy = BulkStore(W, ins, _lane(L, lane))
                bits = None if m is None else int(m[lane])
                copy.linear(int(d[lane]), int(s[lane]), int(n[lane]), reduction, type_name, bits)

        sources = [(dst, "addr64"), (src, "addr32"), (size, "u32")]
        return cg.call(store, sources + ([(rest[-1], "u16")] if masked else []), [])
    source_space = mods.choose("global", "shared::cta")
    mods.choose("mbarrier::complete_tx::bytes")
    reduction = mods.choose(*_REDUCTIONS) if reduce else None
    type_name = mods.type() if reduce else "b8"
    if reduce and type_name[0] not in "usb":
        mods.fail("reductions into shared memory are integer only")
    multicast, hint, group = _cluster_mods(mods)
    dst, src, size, barrier, *rest = mods.args(4 + multicast + hint)

    def load(W: Warp, L: LaneSet, d: np.ndarray, qd: Poison, s: np.ndarray, qs: Poison, n: np.ndarray, qn: Poison,
             b: np.ndarray, qb: Poison, mask: Poison = None, qmask: Poison = None) -> None:  # fmt: skip
        _clean(W, L, ins, (qd, qs, qn, qb, qmask))
        for lane in range(len(d)):
            into = TensorTarget(int(d[lane]), int(b[lane]), None if mask is None else int(mask[lane]), group)
            if source_space == "global":
                BulkLoad(W, ins).linear(into, int(s[lane]), int(n[lane]))
            else:
                copy_shared_to_shared(W, ins, into, int(s[lane]), int(n[lane]), reduction, type_name)

    bits = "addr64" if source_space == "global" else "addr32"
    sources = [(dst, "addr32"), (src, bits), (size, "u32"), (barrier, "addr32")]
    if multicast:
        sources.append((rest[0], "u16"))
    return cg.call(load, sources, [])


def st_async(cg: Codegen, ins: Instr, mods: Mods, space: str) -> None:
    """Emit st.async: stores to a block of the cluster that complete on an mbarrier."""
    return _remote(cg, ins, mods, None)


def red_async(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit red.async: integer reductions that complete on an mbarrier."""
    mods.choose("relaxed", default="relaxed")
    mods.choose("cluster", default="cluster")
    mods.choose("shared::cluster", default="shared::cluster")
    return _remote(cg, ins, mods, mods.choose(*_REDUCTIONS))


def _remote(cg: Codegen, ins: Instr, mods: Mods, reduction: str | None) -> None:
    mods.choose("mbarrier::complete_tx::bytes")
    count = int(mods.choose("v2", "v4", default="v1")[1:])
    type_name = mods.type()
    address, value, barrier = mods.args(3)
    items = value.items if isinstance(value, Vec) else (value,)
    if len(items) != count:
        mods.fail("vector length differs from the operand")

    def run(
        W: Warp,
        L: LaneSet,
        a: np.ndarray,
        qa: Poison,
        b: np.ndarray,
        qb: Poison,
        *values: Any,
    ) -> None:
        _clean(W, L, ins, (qa, qb))
        data = np.stack(values[::2], 1).view("u1")
        poison = np.zeros(len(a), bool)
        for q in values[1::2]:
            poison |= False if q is None else q
        ranks = (a - np.uint32(SHARED_RESERVED)) >> np.uint32(RANK_SHIFT)
        together = count_nonzero((b == b[0]) & (ranks == ranks[0])) == len(a) == len(distinct(a))
        for lanes in [slice(None)] if together else [slice(lane, lane + 1) for lane in range(len(a))]:
            st_async_together(W, ins, a[lanes], int(b[lanes][0]), data[lanes], poison[lanes], reduction, type_name)

    raw = f"b{TYPE_BITS[type_name]}"
    return cg.call(run, [(address, "addr32"), (barrier, "addr32")] + [(v, raw) for v in items], [])


def st_bulk(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit st.bulk: zero a run of shared memory."""
    mods.flag("weak")
    address, size, value = mods.args(3)
    if not isinstance(value, Imm) or value.value:
        mods.fail("st.bulk stores zeros only")

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, n: np.ndarray, qn: Poison) -> None:
        for lane in range(len(a)):
            cta, offset = shared_target(W, ins, int(a[lane]), False)
            count = int(n[lane])
            if offset % 8 or count % 8 or offset + count > cta.shared.limit:
                W.fail(MemoryFault, ins, "st.bulk needs 8-byte aligned bytes inside shared memory")
            if cta.shadow is not None:
                W.shared_write(cta.shadow, np.array([offset], "u4"), 4, count // 4, ins)
            cta.shared.bytes[offset : offset + count] = 0
            cta.shared.init[offset : offset + count] = 1

    return cg.call(run, [(address, "addr32"), (size, "u64")], [])
