"""Emitters of wmma.load, wmma.mma and wmma.store.

The ISA leaves the layout of fragments open. The layout here is ptxas 13.0's for sm_90: it follows mma.sync's fragments,
so that a product is one or two mma.sync. A matrix of 32 rows is two of 16, B of 16 columns two of 8. m8n32k16 computes
the transposed product: A and B change places. The 8 registers of .f16 operands hold copies if fewer would do; products
read the first copy.
"""

from __future__ import annotations

import functools
import re
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic.formats import to_f16
from ..arithmetic.numeric import LaneSet, Poison
from ..errors import SyncError
from ..instructions.load_store import make_load, make_store
from ..parsing.ir import Imm, Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .mma_form import MMA_BITS, WarpMma, warp_mma

_LARGE = ("m16n16k16", "m32n8k16", "m8n32k16")
_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), _LARGE), "tf32": ("m16n16k8",), "f64": ("m8n8k4",),
    **dict.fromkeys(("s4", "u4"), ("m8n8k32",)), "b1": ("m8n8k128",),
}  # fmt: skip
"""Shapes by the type of A and B."""
_SUMS = {"f16": _LARGE, "f32": (*_LARGE, "m16n16k8"), "s32": (*_LARGE, "m8n8k32", "m8n8k128"), "f64": ("m8n8k4",)}
"""Shapes by the type of C and D."""
_SUM_OF = {"bf16": "f32", "tf32": "f32", "f64": "f64"}
_ROLES = {"a": "A", "b": "B", "c": "the accumulator"}
_BITS = {**MMA_BITS, "f32": 32, "s32": 32}


@dataclass(frozen=True)
class Tiles:
    """Composition of a shape's product from mma.sync products."""

    m: int
    n: int
    k: int

    @property
    def swapped(self) -> bool:
        """True if the transposed product is computed."""
        return self.m < self.n

    @property
    def left(self) -> tuple[int, int]:
        """Number of matrices that take A's place, and their rows."""
        rows = max(self.m, self.n) if self.swapped else self.m
        return max(1, rows // 16), min(16, rows)

    @property
    def right(self) -> int:
        """Number of matrices of 8 columns that take B's place."""
        return (self.m if self.swapped else self.n) // 8


def _tiles(shape: str) -> Tiles:
    return Tiles(*(int(v) for v in re.findall(r"\d+", shape)))


@functools.cache
def places(role: str, shape: str, kind: str) -> np.ndarray:
    """Return row and column of every element of a fragment, without its copies, as [2, register, lane, element]."""
    tiles = _tiles(shape)
    bits = _BITS[kind]
    lane, per = np.arange(32)[:, None], max(1, 32 // bits)
    g, c = lane // 4, lane % 4
    count, rows = tiles.left
    halves = rows // 8
    first = (role == "b") if tiles.swapped else (role == "a")
    if role == "c":
        i, e = _numbers(count * tiles.right * halves * 2 // per, per)
        pair, low = np.divmod(i * per + e, 2)
        tile, half = np.divmod(pair, halves)
        row, column = 16 * (tile // tiles.right) + 8 * half + g, 8 * (tile % tiles.right) + 2 * c + low
    else:
        groups = tiles.k // (4 * per)
        i, e = _numbers((count * halves if first else tiles.right) * groups, per)
        tile, i = np.divmod(i, groups * halves if first else groups)
        row = (rows * tile + 8 * (i % halves) if first else 8 * tile) + g
        column = 4 * per * (i // halves if first else i) + per * c + e
    row, column = np.broadcast_arrays(row, column)
    turned = tiles.swapped if role == "c" else role == "b"
    return np.stack([column, row] if turned else [row, column])


def _numbers(registers: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of registers and of their elements, to be combined with lanes."""
    return np.arange(registers)[:, None, None], np.arange(per)


def registers(role: str, shape: str, kind: str) -> int:
    """Return how many registers a fragment has."""
    return 8 if kind == "f16" and role != "c" else places(role, shape, kind).shape[1]


class Access:
    """Places of a fragment's registers in memory: pieces of one access each, and their order."""

    def __init__(self, role: str, shape: str, kind: str, layout: str) -> None:
        self.bits, at = _BITS[kind], places(role, shape, kind)
        self.count = registers(role, shape, kind)
        self.outer, self.inner = at if layout == "row" else at[::-1]
        self.extent = int(self.inner.max()) + 1
        """Elements of a row (of a column, if the layout has columns)."""
        self.line = "row" if layout == "row" else "column"
        whole = at.shape[3] == 1 or bool((self.inner[..., 1] == self.inner[..., 0] + 1).all())
        self.code = f"u{max(32, self.bits) // 8}" if whole else f"u{self.bits // 8}"
        self.pieces = 1 if whole else at.shape[3]
        self.align = self.count * max(32, self.bits) // 8
        self.step = min(16, self.align)

    @functools.lru_cache(maxsize=64)  # noqa: B019 (there is one object for each form)
    def offsets(self, stride: int) -> list[list[np.ndarray]]:
        """Return the byte offsets of every register's pieces, of 32 lanes each."""
        found = (self.outer.astype("i8") * stride + self.inner) * self.bits // 8
        return [[each[:, k] for k in range(self.pieces)] for each in found]

    def start(self, W: Warp, ins: Instr, a: np.ndarray, qa: Poison, s: np.ndarray, qs: Poison) -> tuple[int, int]:
        """Check and return address and stride."""
        for poison, what in ((qa, "an address"), (qs, "a stride")):
            if poison is not None:
                W.poisoned(poison, ins, what, None)
        if (a != a[0]).any() or (s != s[0]).any():
            W.sync_error(ins, "the lanes of a warp give one address and one stride; they differ here")
        stride = int(s[0])
        if int(a[0]) % self.align:
            W.misaligned(ins, a, self.align, None)
        if stride * self.bits % (8 * self.step):
            W.fault(ins, f"stride {stride}: a {self.line} must start at a multiple of {self.step} bytes", None)
        return int(a[0]), stride


@functools.cache
def _access(role: str, shape: str, kind: str, layout: str) -> Access:
    return Access(role, shape, kind, layout)


# ---- what a fragment is --------------------------------------------------------------------------------------------
def _name(W: Warp, values: tuple | list, tag: tuple) -> None:
    """Remember the fragment of some registers; changed registers belong to none."""
    table = W.state.setdefault("wmma", {})
    for value in values:
        key = id(value)
        table[key] = weakref.ref(value, lambda _, key=key: table.pop(key, None)), tag  # type: ignore[misc]


def _same(W: Warp, ins: Instr, values: list, tag: tuple) -> None:
    """Complain if registers are known to belong to another fragment than the one wanted."""
    table = W.state.get("wmma")
    for value in values if table else ():
        owner = value if value.base is None else value.base
        found = table.get(id(owner))
        if found is not None and found[0]() is owner and found[1] != tag:
            why = f"a fragment of {_words(found[1])} is used as one of {_words(tag)}"
            return W.bend("wmma-fragment", SyncError, ins, why)
    return None


def _words(tag: tuple) -> str:
    role, *rest = tag
    return f"{_ROLES[role]} ({', '.join(rest)})"


# ---- instructions --------------------------------------------------------------------------------------------------
@op("wmma", "call", dsts=lambda ins: 0 if "store" in ins.mods else 1, collective=True)
def _wmma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    kind = mods.choose("load", "mma", "store")
    if kind == "mma":
        return _multiply(cg, ins, mods)
    role = mods.choose("a", "b", "c") if kind == "load" else mods.choose("d")
    return (_load if kind == "load" else _store)(cg, ins, mods, "c" if role == "d" else role)


def _shape(mods: Mods) -> str:
    """Take the modifiers that all forms have; return the shape."""
    mods.choose("sync")
    mods.choose("aligned")
    shape = next((m for m in mods.left if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    if not mods.flag(shape):
        mods.fail("needs a shape .mMnNkK")
    return shape


def _form(mods: Mods, role: str) -> tuple[str, str, str, str]:
    """Take the modifiers of a load or store; return shape, layout, state space and type."""
    shape, layout = _shape(mods), mods.choose("row", "col")
    space = mods.choose("global", "shared", "shared::cta", default="generic")
    kind = mods.choose(*(_SUMS if role == "c" else _SHAPES))
    if shape not in (_SUMS if role == "c" else _SHAPES)[kind]:
        mods.fail(f"there is no shape {shape} of .{kind}")
    if _BITS[kind] < 8 and layout != {"a": "row", "b": "col"}[role]:
        mods.fail(f".{kind} has row-major A and column-major B only")
    return shape, layout, space, kind


def _operands(mods: Mods, access: Access, fragment: Vec, given: list, space: str) -> list[tuple]:
    """Return the operands that say where the matrix is, and their types."""
    if len(fragment.items) != access.count:
        mods.fail(f"a fragment of this form has {access.count} registers, not {len(fragment.items)}")
    address, stride = given[0], given[1] if len(given) > 1 else Imm(access.extent)
    return [(address, "addr32" if space.startswith("shared") else "addr64"), (stride, "u32")]


def _load(cg: Codegen, ins: Instr, mods: Mods, role: str) -> None:
    shape, layout, space, kind = _form(mods, role)
    access = _access(role, shape, kind, layout)
    fragment, *given = mods.args(2, 3)
    sources = _operands(mods, access, fragment, given, space)
    load = make_load(space, access.code, 1, ins)
    tag = (role, shape, kind) if role == "c" else (role, shape, kind, layout)
    word = "u8" if kind == "f64" else "u4"

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, s: np.ndarray, qs: Poison) -> tuple:
        if L is not None:
            W.sync_error(ins, "wmma needs all 32 lanes of the warp", L)
        base, stride = access.start(W, ins, a, qa, s, qs)
        values, masks = [], []
        for pieces in access.offsets(stride):
            parts = [load(W, None, (base + each).astype(a.dtype), None) for each in pieces]
            value = parts[0][0].astype(word)
            for k, part in enumerate(parts[1:], 1):
                value |= part[0].astype(word) << np.uint32(k * access.bits)
            values.append(value)
            masks.append(_either([part[1] for part in parts]))
        _name(W, values, tag)
        copies = access.count // len(values)
        return tuple(x for pair in zip(values * copies, masks * copies, strict=True) for x in pair)

    cg.call(run, sources, [(item, "b64" if kind == "f64" else "b32") for item in fragment.items])


def _either(masks: list[Poison]) -> Poison:
    """Return where any of some registers is poison."""
    some = [m for m in masks if m is not None]
    return np.logical_or.reduce(some) if some else None


def _store(cg: Codegen, ins: Instr, mods: Mods, role: str) -> None:
    shape, layout, space, kind = _form(mods, role)
    access = _access(role, shape, kind, layout)
    address, fragment, *given = mods.args(2, 3)
    sources = _operands(mods, access, fragment, [address, *given], space)
    store = make_store(space, access.code, 1, ins)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, s: np.ndarray, qs: Poison, *values: Any) -> None:
        if L is not None:
            W.sync_error(ins, "wmma needs all 32 lanes of the warp", L)
        base, stride = access.start(W, ins, a, qa, s, qs)
        if stride < access.extent:
            why = f"stride {stride}: {access.line}s of {access.extent} elements overlap, and which stays is not defined"
            W.fault(ins, why, None)
        _same(W, ins, list(values[::2]), (role, shape, kind))
        for pieces, value, poison in zip(access.offsets(stride), values[::2], values[1::2], strict=True):
            for k, each in enumerate(pieces):
                part = (value >> value.dtype.type(k * access.bits)).astype(access.code)
                store(W, None, (base + each).astype(a.dtype), None, part, poison)

    cg.call(run, sources + [(item, "b64" if kind == "f64" else "b32") for item in fragment.items], [])


def _multiply(cg: Codegen, ins: Instr, mods: Mods) -> None:
    bitwise = mods.choose("xor", "and") if mods.flag("popc") else ""
    shape = _shape(mods)
    clamp = mods.flag("satfinite")
    mods.flag("rn")
    layouts, mods.left = (
        [x for x in mods.left if x in ("row", "col")],
        [x for x in mods.left if x not in ("row", "col")],
    )
    kinds, mods.left = mods.left, []
    if len(kinds) == 2:  # of D and C: A and B are .f16
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    if len(layouts) != 2 or len(kinds) != 4:
        mods.fail("needs two layouts, and types of D, A, B and C (of D and C alone, if A and B are .f16)")
    out, kind, other, old = kinds
    sums = ("f16", "f32") if kind == "f16" else (_SUM_OF.get(kind, "s32"),)
    wrong = kind != other or shape not in _SHAPES.get(kind, ()) or {out, old} - set(sums)
    if wrong or bool(bitwise) != (kind == "b1") or (clamp and (kind == "b1" or out != "s32")):
        mods.fail("there is no such combination of shape and types")
    if _BITS[kind] < 8 and layouts != ["row", "col"]:
        mods.fail(f".{kind} has row-major A and column-major B only")
    _emit_product(cg, ins, mods, Product(shape, kind, out, old, clamp, bitwise == "xor"), layouts)


class Product:
    """The product of a wmma.mma."""

    def __init__(self, shape: str, kind: str, out: str, old: str, clamp: bool, differing: bool) -> None:
        self.shape, self.kind, self.out, self.old = shape, kind, out, old
        self.tiles = _tiles(shape)
        inner = out if out == old else "f32"
        rows = self.tiles.left[1]
        self.form: WarpMma = warp_mma(rows, self.tiles.k, kind, kind, inner, clamp, differing)

    def multiply(self, a: list, b: list, c: list) -> list[tuple]:
        """Return D's registers from the operands' registers, each a pair of value and poison."""
        form, right = self.form, self.tiles.right
        if self.tiles.swapped:
            a, b = b, a
        if self.old == "f16" != self.out:
            c = [half for pair in c for half in _widened(pair)]
        found: list[tuple] = []
        for i in range(self.tiles.left[0]):
            for j in range(right):
                at = (i * right + j) * form.outputs
                given = [*_part(a, i, form.a_count), *_part(b, j, form.b_count), *c[at : at + form.outputs]]
                flat = form.multiply([v for v, _ in given], [q for _, q in given])
                found += zip(flat[::2], flat[1::2], strict=True)
        if self.out == "f16" != self.old:
            found = [_narrowed(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
        return found


def _part(registers: list, index: int, count: int) -> list:
    return registers[index * count : (index + 1) * count]


def _widened(pair: tuple) -> list[tuple]:
    """Return the two halves of a register as float32."""
    halves = np.ascontiguousarray(pair[0]).view("f2").astype("f4").view("u4").reshape(32, 2)
    return [(halves[:, k].copy(), pair[1]) for k in range(2)]


def _narrowed(low: tuple, high: tuple) -> tuple:
    """Return a register of two halves, from two of float32."""
    parts = [to_f16(np.ascontiguousarray(x[0]).view("f4")).view("u2").astype("u4") for x in (low, high)]
    return parts[0] | parts[1] << np.uint32(16), _either([low[1], high[1]])


def _emit_product(cg: Codegen, ins: Instr, mods: Mods, product: Product, layouts: list[str]) -> None:
    shape, kind = product.shape, product.kind
    d, a, b, c = mods.args(4)
    counts = [len(v.items) for v in (d, a, b, c)]
    wanted = [registers(r, shape, k) for r, k in zip("cabc", (product.out, kind, kind, product.old), strict=True)]
    if counts != wanted:
        mods.fail(f"takes {', '.join(map(str, wanted))} registers, has {counts}")
    first, second = counts[1], counts[1] + counts[2]
    tags = [("a", shape, kind, layouts[0]), ("b", shape, kind, layouts[1]), ("c", shape, product.old)]
    flops = 2 * product.tiles.m * product.tiles.n * product.tiles.k

    def run(W: Warp, L: LaneSet, *values: Any) -> tuple:
        if L is not None:
            W.sync_error(ins, "wmma needs all 32 lanes of the warp", L)
        pairs = list(zip(values[::2], values[1::2], strict=True))
        parts = pairs[:first], pairs[first:second], pairs[second:]
        for part, tag in zip(parts, tags, strict=True):
            _same(W, ins, [value for value, _ in part], tag)
        W.launch.counters[f"flops wmma {kind}"] += flops
        found = product.multiply(*parts)
        _name(W, [value for value, _ in found], ("c", shape, product.out))
        return tuple(x for pair in found for x in pair)

    wide = "b64" if kind == "f64" else "b32"
    cg.call(run, [(v, wide) for v in (*a.items, *b.items, *c.items)], [(v, wide) for v in d.items])
