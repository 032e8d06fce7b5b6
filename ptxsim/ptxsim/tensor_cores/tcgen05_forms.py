"""Emitters of tcgen05 instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import SyncError
from ..parsing.ir import Addr, Imm, Instr, Reg, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from . import block_scale, tmem_access, tmem_alloc, tmem_copy, umma
from .tcgen05 import DENSE
from .tmem import SHAPES
from .wgmma_forms import direct

_COLLECTIVE = ("alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "wait::ld", "wait::st")


def _dsts(ins: Instr) -> int:
    return 1 if ins.mods[:1] == ["ld"] else 0


def _is_collective(ins: Instr) -> bool:
    return ins.mods[:1] != [] and ins.mods[0] in _COLLECTIVE


def _group(mods: Mods) -> int:
    return int(mods.choose("cta_group::1", "cta_group::2")[-1])


@op("tcgen05", "direct", dsts=_dsts, collective=_is_collective)
def _tcgen05(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.left.pop(0) if mods.left else ""
    table = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": _ld_st,
        "st": _ld_st,
        "mma": _mma,
        "commit": _commit,
        "cp": _cp,
        "shift": _shift,
    }
    if kind in ("wait::ld", "wait::st"):
        mods.choose("sync")
        mods.choose("aligned")
        return direct(cg, lambda W, L: tmem_access.wait(W, ins, kind))
    if kind == "fence::before_thread_sync":
        return direct(cg, lambda W, L: tmem_access.fence_before(W))
    if kind == "fence::after_thread_sync":
        return direct(cg, lambda W, L: tmem_access.fence_after(W))
    if kind not in table:
        mods.fail(f"tcgen05.{kind} is not modelled")
    return table[kind](cg, ins, mods, kind)


def values(cg: Codegen, function: Any, sources: list[tuple]) -> None:
    """Emit ``function(W, L, value, poison, ...)`` which may park."""
    names = []
    for operand, type_name in sources:
        cg.sources = []
        if type_name.startswith("addr"):
            names.append(cg.addr(operand, int(type_name[4:])))
        else:
            names.append(cg.src(operand, type_name))
        names.append(cg.sources[0] if cg.sources else "None")
    result = cg.name("z")
    cg.line(f"{result} = {cg.bind(function)}(W, L, {', '.join(names)})")
    cg.line(f"if {result}.__class__ is Park: return {result}")


def uniform(W: Warp, ins: Instr, L: LaneSet, pairs: tuple, what: str) -> list:
    """Return lane 0's values; poison is an error."""
    for q in pairs[1::2]:
        if q is not None:
            W.poisoned(q, ins, what, L)
    return [v[0] for v in pairs[::2]]


def same(W: Warp, ins: Instr, L: LaneSet, pairs: tuple, what: str) -> list:
    """Return the value that all lanes give."""
    for v in pairs[::2]:
        if count_nonzero(v != v[0]):
            W.fail(SyncError, ins, f"{what} differs between the lanes of a warp", L)
    return uniform(W, ins, L, pairs, what)


def _alloc(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    mods.choose("sync")
    mods.choose("aligned")
    shared = mods.flag("shared::cta")
    mods.type("b32")
    address, columns = mods.args(2)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> Any:
        at, count = same(W, ins, L, pairs, "the operand of tcgen05.alloc")
        return tmem_alloc.alloc(W, ins, L, group, int(at), int(count))

    values(cg, run, [(address, "addr32" if shared else "addr64"), (columns, "u32")])


def _dealloc(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    mods.choose("sync")
    mods.choose("aligned")
    mods.type("b32")
    address, columns = mods.args(2)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> Any:
        at, count = same(W, ins, L, pairs, "the operand of tcgen05.dealloc")
        return tmem_alloc.dealloc(W, ins, L, group, int(at), int(count))

    values(cg, run, [(address, "b32"), (columns, "u32")])


def _relinquish(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    mods.choose("sync")
    mods.choose("aligned")
    direct(cg, lambda W, L: tmem_alloc.relinquish(W, ins, L, group))


def _ld_st(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    mods.choose("sync")
    mods.choose("aligned")
    shape = mods.choose(*SHAPES)
    count = int(mods.choose(*(f"x{1 << i}" for i in range(8)))[1:])
    packed = mods.flag("pack::16b" if kind == "ld" else "unpack::16b")
    mods.type("b32")
    args = list(ins.args)
    split = 0
    if kind == "ld":
        registers, address = args.pop(0), args.pop(0)
        if shape == "16x32bx2":
            split = args.pop(0).value
    else:
        address = args.pop(0)
        if shape == "16x32bx2":
            split = args.pop(0).value
        registers = args.pop(0)
    items = list(registers.items) if isinstance(registers, Vec) else [registers]
    per_rep, limit = SHAPES[shape]
    if args or len(items) != per_rep * count or count > limit or not all(isinstance(r, Reg) for r in items):
        mods.fail(f"shape .{shape}.x{count} takes {per_rep * count} registers")
    function = tmem_access.load if kind == "ld" else tmem_access.store

    def run(W: Warp, L: LaneSet, taddr: np.ndarray, q: Poison) -> None:
        if q is not None:
            W.poisoned(q, ins, "a tensor-memory address", L)
        function(W, ins, L, taddr, items, shape, count, split, packed)

    values(cg, run, [(address, "addr32")])


def single(W: Warp, ins: Instr, L: LaneSet, what: str) -> None:
    """Raise (or warn) unless one thread issues."""
    count = W.width(L)
    if count != 1:
        W.bend(
            "tcgen05-issue",
            SyncError,
            ins,
            f"{what} is issued by {count} threads of the warp at once: each issues its own",
        )


def _mma(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    if "sp" in mods.left:
        mods.fail("tcgen05.mma.sp is not modelled")
    (_scaled_mma if "block_scale" in mods.left else _dense_mma)(cg, ins, mods)


def _dense_mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    ws, ashift = mods.flag("ws"), mods.flag("ashift")
    group = _group(mods)
    mma_kind = mods.choose(*(f"kind::{k}" for k in DENSE))[6:]
    _collector(mods, ws, ashift)
    d, a, b, idesc, *rest = ins.args
    mask = list(rest.pop(0).items) if rest and isinstance(rest[0], Vec) else []
    if mask and (ws or len(mask) != 4 * group):
        mods.fail("disable-output-lane vector")
    if not 1 <= len(rest) <= 2 or (len(rest) == 2 and not ws and not isinstance(rest[1], Imm)):
        mods.fail("operand form")
    scale = rest[1].value if len(rest) == 2 and not ws else 0
    if len(rest) == 2 and not ws and (mma_kind not in ("f16", "tf32") or not 0 <= scale <= 15):
        mods.fail("scale-input-d is for .kind::f16 and .kind::tf32, 0..15")
    columns = [rest[1]] if len(rest) == 2 and ws else []
    in_tmem = isinstance(a, Addr)
    if ashift and (ws or not in_tmem):
        mods.fail(".ashift needs A in tensor memory, and not .ws")
    form = umma.Form(mma_kind, group, ws, in_tmem, ashift, scale)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> None:
        uniform(W, ins, L, pairs, "an operand of tcgen05.mma")
        single(W, ins, L, "tcgen05.mma")
        for lane in range(len(pairs[0])):
            dv, av, bv, iv, ev, *more = (p[lane] for p in pairs[::2])
            zeros = int(more.pop()) if columns else 0
            lanes = tuple(int(m) for m in more)
            umma.Mma(W, ins, form, umma.Operands(int(dv), int(av), int(bv), int(iv), bool(ev), lanes, zeros)).issue()

    sources = [(d, "addr32"), (a, "addr32" if in_tmem else "b64"), (b, "b64"), (idesc, "b32"), (rest[0], "pred")]
    sources += [(m, "b32") for m in mask] + [(c, "b64") for c in columns]
    values(cg, run, sources)


def _scaled_mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit tcgen05.mma with scale factors in tensor memory."""
    group = _group(mods)
    mma_kind = mods.choose("kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4")[6:]
    mods.choose("block_scale")
    vector = mods.choose("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32", default="")
    if (mma_kind, vector) not in block_scale.VECTORS:
        mods.fail(f".kind::{mma_kind} and .{vector or 'no scale vector size'} do not go together")
    _collector(mods, False, False)
    d, a, b, idesc, sfa, sfb, enable = mods.args(7)
    in_tmem = isinstance(a, Addr)
    form = umma.Form(mma_kind, group, False, in_tmem, vectors=block_scale.VECTORS[mma_kind, vector])

    def run(W: Warp, L: LaneSet, *pairs: Any) -> None:
        uniform(W, ins, L, pairs, "an operand of tcgen05.mma")
        single(W, ins, L, "tcgen05.mma")
        for lane in range(len(pairs[0])):
            dv, av, bv, iv, ev, left, right = (p[lane] for p in pairs[::2])
            operands = umma.Operands(int(dv), int(av), int(bv), int(iv), bool(ev), sfa=int(left), sfb=int(right))
            block_scale.ScaledMma(W, ins, form, operands).issue()

    sources = [(d, "addr32"), (a, "addr32" if in_tmem else "b64"), (b, "b64"), (idesc, "b32"), (enable, "pred")]
    values(cg, run, [*sources, (sfa, "addr32"), (sfb, "addr32")])


def _collector(mods: Mods, ws: bool, ashift: bool) -> None:
    """Take a collector hint: it changes no result, but must be one that the form has."""
    usage = next((m for m in mods.left if m.startswith("collector::")), "")
    if not usage:
        return
    mods.flag(usage)
    buffers = ("b0", "b1", "b2", "b3") if ws else ("a",)
    _, buffer, what = (*usage.replace("::", ":").split(":"), "")[:3]
    if buffer not in buffers or what not in ("fill", "use", "lastuse", "discard"):
        mods.fail(f"unknown collector usage .{usage}")
    if ashift and what in ("use", "fill"):
        mods.fail(f".ashift with .{usage} is illegal")


def _commit(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    mods.choose("mbarrier::arrive::one")
    shared = mods.flag("shared::cluster")
    multicast = mods.flag("multicast::cluster")
    mods.type("b64")
    address, *mask = mods.args(2 if multicast else 1)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> None:
        uniform(W, ins, L, pairs, "an operand of tcgen05.commit")
        single(W, ins, L, "tcgen05.commit")
        for lane in range(len(pairs[0])):
            umma.commit(W, ins, group, int(pairs[0][lane]), int(pairs[2][lane]) if multicast else None)

    operand = address if isinstance(address, Addr) else Addr(address)
    values(cg, run, [(operand, "addr32" if shared else "addr64")] + [(m, "u16") for m in mask])


def _cp(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    shape = mods.choose("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = mods.choose("warpx2::02_13", "warpx2::01_23", "warpx4", default="")
    if (shape, multicast) not in tmem_copy.COPY_FORMS:
        mods.fail("shape and multicast do not fit")
    source = mods.choose(*tmem_copy.FORMATS) if mods.flag("b8x16") else ""
    address, desc = mods.args(2)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> None:
        uniform(W, ins, L, pairs, "an operand of tcgen05.cp")
        single(W, ins, L, "tcgen05.cp")
        for lane in range(len(pairs[0])):
            at, what = int(pairs[0][lane]), int(pairs[2][lane])
            tmem_copy.copy(W, ins, group, (shape, multicast), source, at, what)

    values(cg, run, [(address, "addr32"), (desc, "b64")])


def _shift(cg: Codegen, ins: Instr, mods: Mods, kind: str) -> None:
    group = _group(mods)
    mods.choose("down")
    (address,) = mods.args(1)

    def run(W: Warp, L: LaneSet, *pairs: Any) -> None:
        uniform(W, ins, L, pairs, "an operand of tcgen05.shift")
        single(W, ins, L, "tcgen05.shift")
        for at in pairs[0]:
            tmem_copy.shift(W, ins, group, int(at))

    values(cg, run, [(address, "addr32")])
