"""Emitters of ldmatrix, stmatrix, movmatrix and the warp-level mma."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arithmetic import native
from ..arithmetic.formats import to_f16
from ..arithmetic.native import MmaForm
from ..arithmetic.numeric import LaneSet, Poison, count_nonzero
from ..errors import MemoryFault
from ..memory.spaces import GENERIC_BASE
from ..parsing.ir import Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from .operand import widen


def _row_chunks(W: Warp, ins: Instr, L: LaneSet, a: np.ndarray, qa: Poison, rows: int) -> np.ndarray:
    """Return the 16-byte chunk index of every row address."""
    if L is not None:
        W.sync_error(ins, "an .aligned matrix instruction needs all 32 lanes of the warp", L)
    if qa is not None:
        W.poisoned(qa[:rows], ins, "an address", None)
    offset = (a - W.cta.shared_base)[:rows]
    if count_nonzero(offset & np.uint32(15)):
        W.misaligned(ins, a[:rows], 16, None)
    chunks = (offset >> np.uint32(4)).astype(np.intp)
    if int(chunks.max()) >= len(W.cta.shared.chunks):
        W.fail(MemoryFault, ins, "a matrix row is outside the block's shared memory")
    return chunks


def _form(mods: Mods, byte_shape: str) -> tuple[int, bool, bool]:
    """Take the modifiers; return how many matrices, whether they are transposed, and whether elements are bytes."""
    if "b8x16" in mods.left:
        mods.fail("6- and 4-bit sources are not modelled")
    mods.choose("sync")
    mods.choose("aligned")
    small = mods.choose("m8n8", byte_shape) != "m8n8"
    count = int(mods.choose("x1", "x2", "x4")[1:])
    transposed = mods.flag("trans")
    mods.choose("shared", "shared::cta", default="")
    if mods.type("b8", "b16") != ("b8" if small else "b16") or (small and not transposed):
        mods.fail(f".m8n8 has .b16 elements, .{byte_shape} has .b8 and .trans")
    return count, transposed, small


def _address(mods: Mods, ins: Instr) -> str:
    """Return the width of the address operand: a generic address when no state space is named."""
    return "addr32" if {"shared", "shared::cta"} & set(ins.mods) else "addr64"


def window(a: np.ndarray) -> np.ndarray:
    """Return addresses in the shared window: generic ones lose their base."""
    return (a - np.uint64(GENERIC_BASE["shared"])).astype("u4") if a.dtype.itemsize == 8 else a


def transpose8(block: np.ndarray) -> np.ndarray:
    """Transpose 8x8 matrices of 16-bit elements given as [n, 8, 4] words."""
    halves = np.ascontiguousarray(block).view("u2").reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view("u4")


@op("ldmatrix", "call", collective=True)
def _ldmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    count, transposed, small = _form(mods, "m16n16")
    dst, address = mods.args(2)
    items = dst.items if isinstance(dst, Vec) else (dst,)
    if len(items) != count * (1 + small):
        mods.fail("vector length differs from the matrix count")
    if small:
        return cg.call(_byte_loader(ins, count), [(address, _address(mods, ins))], [(item, "b32") for item in items])

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        a = window(a)
        chunks = _row_chunks(W, ins, L, a, qa, 8 * count)
        cta = W.cta
        data = cta.shared.chunks[chunks].reshape(count, 8, 4)
        defined = cta.shared.chunk_init[chunks].reshape(count, 8, 4) == 0x01010101
        if cta.shadow is not None:
            W.shared_read(cta.shadow, (chunks << 4).astype("u4"), 4, 4, ins)
        if W.banks is not None:
            W.banks.access(ins, chunks << 4, 16)
        W.traffic[0] += 128 * count
        clean = defined.all()
        if transposed:
            data = transpose8(data)
        out = []
        for k in range(count):
            poison = None
            if not clean:
                bad = ~defined[k]
                if transposed:
                    rows = bad.repeat(2, axis=1)
                    bad = rows.T.reshape(8, 4, 2).any(2)
                poison = bad.reshape(32)
            out += [data[k].reshape(32), poison]
        return tuple(out)

    return cg.call(run, [(address, _address(mods, ins))], [(item, "b32") for item in items])


def _byte_loader(ins: Instr, count: int) -> Callable:
    """Return ldmatrix.m16n16.trans.b8: lane (g, c) gets rows 4c to 4c+3 of column g, then of column g + 8.

    The ISA shows this as a figure only; CUTLASS's layout of SM100_U8x8_LDSM_T says the same.
    """

    def split(data: np.ndarray) -> np.ndarray:
        """[matrix, 16 rows, 16 bytes] to [matrix, half, lane, 4 bytes]."""
        parts = data.reshape(count, 4, 4, 2, 8).transpose(0, 3, 4, 1, 2)  # matrix, half, g, c, byte
        return np.ascontiguousarray(parts).reshape(count, 2, 32, 4)

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison) -> tuple:
        chunks = _row_chunks(W, ins, L, window(a), qa, 16 * count)
        shared, shadow = W.cta.shared, W.cta.shadow
        if shadow is not None:
            W.shared_read(shadow, (chunks << 4).astype("u4"), 4, 4, ins)
        values = split(shared.chunks[chunks].view("u1")).view("u4")[..., 0]
        bad = np.any(split(shared.chunk_init[chunks].view("u1") != 1), axis=-1)
        W.traffic[0] += 256 * count
        parts = [(values[m, h], bad[m, h] if bad[m, h].any() else None) for m in range(count) for h in range(2)]
        return tuple(x for part in parts for x in part)

    return run


@op("stmatrix", "call", dsts=0, collective=True)
def _stmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    count, transposed, small = _form(mods, "m16n8")
    address, source = mods.args(2)
    items = source.items if isinstance(source, Vec) else (source,)
    if len(items) != count:
        mods.fail("vector length differs from the matrix count")

    arrange = _bytes_to_rows if small else transpose8

    def run(W: Warp, L: LaneSet, a: np.ndarray, qa: Poison, *values: Any) -> None:
        a = window(a)
        chunks = _row_chunks(W, ins, L, a, qa, 8 * count)
        cta = W.cta
        data = np.stack(values[::2]).reshape(count, 8, 4)
        data = arrange(data) if transposed else data
        defined: np.ndarray = np.full((count * 8, 4), 0x01010101, "u4")
        if any(poison is not None for poison in values[1::2]):
            words = [np.where(np.zeros(32, bool) if q is None else q, 0, 0x01010101) for q in values[1::2]]
            defined = np.stack(words).astype("u4").reshape(count, 8, 4)
            defined = (arrange(defined) if transposed else defined).reshape(-1, 4)
        if cta.shadow is not None:
            W.shared_write(cta.shadow, (chunks << 4).astype("u4"), 4, 4, ins)
            if len(np.unique(chunks)) < len(chunks):
                W.sync_error(ins, "two rows of one stmatrix have the same address")
        if W.banks is not None:
            W.banks.access(ins, chunks << 4, 16)
        cta.shared.chunks[chunks] = data.reshape(-1, 4)
        cta.shared.chunk_init[chunks] = defined
        W.traffic[1] += 128 * count

    cg.call(run, [(address, _address(mods, ins))] + [(item, "b32") for item in items], [])


def _bytes_to_rows(words: np.ndarray) -> np.ndarray:
    """Turn stmatrix.m16n8 fragments [n, 8 g, 4 c] into rows [n, 8, 4 words].

    A lane's bytes are rows 2c and 2c+1 of column g, then of column g + 8 (CUTLASS's layout of SM100_U8x4_STSM_T).
    """
    count = words.shape[0]
    parts = np.ascontiguousarray(words).view("u1").reshape(count, 8, 4, 2, 2)  # matrix, g, c, half, row
    rows = np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(count, 8, 16)
    return rows.view("u4")


@op("movmatrix", "call", collective=True)
def _movmatrix(cg: Codegen, ins: Instr, mods: Mods) -> None:
    for name in ("sync", "aligned", "m8n8", "trans"):
        mods.choose(name)
    mods.type("b16")
    dst, a = mods.args(2)

    def run(W: Warp, L: LaneSet, v: np.ndarray, q: Poison) -> tuple:
        poison = None if q is None else np.full(32, bool(q.any()))
        return transpose8(v.reshape(1, 8, 4)).reshape(32), poison

    cg.call(run, [(a, "b32")], [(dst, "b32")])


#: Bits of an element and how registers hold it.
_MMA_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
             "f64": 64}  # fmt: skip
_MMA_SHAPES = {
    "f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32), "s8": (16, 32), "u8": (16, 32),
    "s4": (32, 64), "u4": (32, 64), "b1": (128, 256), "f64": (4, 8, 16),
}  # fmt: skip
_SMALL_SHAPES = {"f64": 4, "s8": 16, "u8": 16, "s4": 32, "u4": 32, "b1": 128}
"""Depths of the shapes with eight rows."""
_ACCUMULATORS = {"f16": ("f16", "f32"), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",),
                 "s4": ("s32",), "u4": ("s32",), "b1": ("s32",), "f64": ("f64",)}  # fmt: skip


@op("mma", "call", collective=True)
def _mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit ``mma.sync.aligned.shape.row.col.d.a.b.c`` without sparsity or scales."""
    if any(m.startswith(("sp", "kind")) for m in mods.left):
        mods.fail("sparse and block-scaled forms are not modelled")
    mods.choose("sync")
    mods.choose("aligned")
    shape = next((m for m in mods.left if re.fullmatch(r"m(8|16)n8k\d+", m)), None)
    if shape is None:
        mods.fail("needs a shape .m16n8kK or .m8n8kK")
    mods.flag(shape)
    mods.choose("row")
    mods.choose("col")
    clamp = mods.flag("satfinite")
    bitwise = ""
    if "b1" in mods.left:
        bitwise = mods.choose("xor", "and")
        mods.choose("popc")
    types, mods.left = mods.left, []
    rows, depth = (int(v) for v in re.findall(r"[mk](\d+)", shape))
    if len(types) != 4 or {types[1], types[2]} - set(_MMA_BITS):
        mods.fail("operand types are not modelled")
    out, kind_a, kind_b, _ = types
    small = rows == 8 and _SMALL_SHAPES.get(kind_a) == depth
    if not small and (rows == 8 or depth not in _MMA_SHAPES[kind_a]):
        mods.fail(f"shape {shape} of .{kind_a} is not modelled")
    if types[3] != out or out not in _ACCUMULATORS.get(kind_a, ("f32",)) or _MMA_BITS[kind_a] != _MMA_BITS[kind_b]:
        mods.fail("this combination of types is not modelled")
    if (kind_a == "b1") != (kind_b == "b1") or (clamp and kind_a == "b1"):
        mods.fail("this combination of types is not modelled")
    form = _form_of(rows, depth, kind_a, kind_b, out, clamp, bitwise == "xor")
    d, a, b, c = mods.args(4)
    counts = [len(v.items) for v in (d, a, b, c)]
    if counts != [form.outputs, form.a_count, form.b_count, form.outputs]:
        mods.fail(f"takes {form.outputs}, {form.a_count}, {form.b_count} and {form.outputs} registers, has {counts}")

    def run(W: Warp, L: LaneSet, *values: Any) -> tuple:
        if L is not None:
            W.sync_error(ins, "mma needs all 32 lanes of the warp", L)
        W.launch.counters[f"flops mma {kind_a}"] += 2 * rows * 8 * depth
        return form.multiply(list(values[::2]), list(values[1::2]))

    wide = "b64" if kind_a == "f64" else "b32"
    sources = [(v, wide) for v in (*a.items, *b.items, *c.items)]
    return cg.call(run, sources, [(v, wide) for v in d.items])


class _MmaForm:
    """Shape and types of an mma, and its fragment layouts.

    Lane (g, c) = (lane / 4, lane % 4). Register i of A holds row g + 8 (i % (M/8)) and ``e`` neighbouring columns from
    4e (i / (M/8)) + e c; register i of B holds ``e`` neighbouring rows from 4e i + e c of column g; C and D hold row
    g + 8 (j / 2) and column 2c + j % 2 (ISA: matrix fragments of mma).
    """

    def __init__(
        self, rows: int, depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, differing: bool = False
    ) -> None:
        self.rows, self.depth, self.kinds, self.out, self.clamp = rows, depth, (kind_a, kind_b), out, clamp
        self.differing = differing  # single bits are counted where they differ, not where both are set
        self.wide = kind_a == "f64"
        self.per_register = max(1, 32 // _MMA_BITS[kind_a])
        self.b_count = depth // (4 * self.per_register)
        self.a_count = self.b_count * rows // 8
        self.outputs = rows // 8 * (1 if out == "f16" else 2)

        self.native = self._native()

    def _native(self) -> tuple[Callable, MmaForm] | None:
        """Return the product in C and what it is told of the form; None: it is left to NumPy."""
        bits = _MMA_BITS[self.kinds[0]]
        if not native.available() or self.out not in ("f32", "s32") or not 8 <= bits <= 32:
            return None
        form = MmaForm(self.rows, self.depth, bits, self.out == "s32", self.clamp)
        tables = [widen(np.arange(1 << bits, dtype=f"u{bits // 8}"), kind) for kind in self.kinds] if bits < 32 else []
        return native.mma(form, tables, self.a_count + self.b_count + self.outputs, self.outputs), form

    def multiply(self, words: list[np.ndarray], masks: list[np.ndarray | None]) -> tuple:
        """Return D's registers and their poison, in turns."""
        registers = self._product(words)
        bad = self._poison(masks)
        return tuple(x for k in range(self.outputs) for x in (registers[k], None if bad is None else bad[:, k]))

    def _product(self, words: list[np.ndarray]) -> Sequence[np.ndarray]:
        """Return D's registers."""
        if self.native is None:
            return self._by_numpy(words)
        function, form = self.native
        found = function(*words)
        if form.nan:  # whose bits are NumPy's
            form.nan = 0
            return self._by_numpy(words)
        return found

    def _unpack(self, words: list[np.ndarray], kind: str) -> np.ndarray:
        """Return [lane, register, element] numbers."""
        raw = np.ascontiguousarray(np.stack(words, 1))
        if kind == "f64":
            return raw.view("f8")[..., None]
        bits = _MMA_BITS[kind]
        if bits < 8:
            values = raw[..., None] >> (bits * np.arange(self.per_register)).astype("u4") & ((1 << bits) - 1)
            numbers = values.astype("f8")
            return np.where(numbers > 7, numbers - 16, numbers) if kind == "s4" else numbers
        values = raw.view(f"u{bits // 8}").reshape(32, len(words), self.per_register)
        return widen(values, kind).astype("f8")

    def _a(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, register, element] of A as [row, column]."""
        part = lanes.reshape(8, 4, self.b_count, self.rows // 8, lanes.shape[-1])
        return part.transpose(3, 0, 2, 1, 4).reshape(self.rows, -1)

    def _b(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, register, element] of B as [row, column]."""
        return lanes.reshape(8, 4, self.b_count, lanes.shape[-1]).transpose(2, 1, 3, 0).reshape(-1, 8)

    def _c(self, lanes: np.ndarray) -> np.ndarray:
        """Arrange [lane, element] of C as [row, column]."""
        return lanes.reshape(8, 4, self.rows // 8, 2).transpose(2, 0, 1, 3).reshape(self.rows, 8)

    def _by_numpy(self, words: list[np.ndarray]) -> list[np.ndarray]:
        na, nb = self.a_count, self.b_count
        a = self._a(self._unpack(words[:na], self.kinds[0]))
        b = self._b(self._unpack(words[na : na + nb], self.kinds[1]))
        raw = np.ascontiguousarray(np.stack(words[na + nb :], 1))
        code = {"f32": "f4", "s32": "i4", "f64": "f8", "f16": "f2"}[self.out]
        products = a @ b
        if self.differing:
            products = a.sum(1)[:, None] + b.sum(0) - 2 * products
        total = products + self._c(raw.view(code).astype("f8"))
        if self.out == "s32":
            total = np.clip(total, -(2**31), 2**31 - 1) if self.clamp else total
            total = total.astype("i8")
        result = to_f16(total) if self.out == "f16" else total.astype(code)
        lanes = np.ascontiguousarray(result.reshape(self.rows // 8, 8, 4, 2).transpose(1, 2, 0, 3)).reshape(32, -1)
        out = lanes.view("u8" if self.wide else "u4")
        return [out[:, k].copy() for k in range(self.outputs)]

    def _poison(self, masks: list[np.ndarray | None]) -> np.ndarray | None:
        """Return poison per lane and D register: rows of A, columns of B and elements of C pass it on."""
        if all(m is None or not count_nonzero(m) for m in masks):
            return None
        na, nb = self.a_count, self.b_count
        known = [np.zeros(32, bool) if m is None else m for m in masks]
        a, b = (np.stack(known[k], 1)[..., None] for k in (slice(na), slice(na, na + nb)))
        c = np.stack(known[na + nb :], 1)
        c = c.repeat(2, axis=1) if self.out == "f16" else c
        bad = np.any(self._a(a), axis=1)[:, None] | np.any(self._b(b), axis=0)[None, :] | self._c(c)
        lanes = bad.reshape(self.rows // 8, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, -1)
        return lanes.reshape(32, -1, 2).any(2) if self.out == "f16" else lanes


@functools.cache
def _form_of(
    rows: int, depth: int, kind_a: str, kind_b: str, out: str, clamp: bool, differing: bool = False
) -> _MmaForm:
    """Return the one object of a form, which all its instructions share."""
    return _MmaForm(rows, depth, kind_a, kind_b, out, clamp, differing)
