"""Emitters of ldmatrix, stmatrix, movmatrix and the warp-level mma."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic.numeric import LaneSet, Poison, count_nonzero, distinct
from ..errors import MemoryFault
from ..memory.spaces import GENERIC_BASE
from ..parsing.ir import Instr, Vec
from ..state.warp import Warp
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op
from . import mma_sparse
from .mma_form import WarpMma, warp_mma


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
            if len(distinct(chunks)) < len(chunks):
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


_MMA_SHAPES = {
    "f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32), "s8": (16, 32), "u8": (16, 32),
    "s4": (32, 64), "u4": (32, 64), "b1": (128, 256), "f64": (4, 8, 16),
}  # fmt: skip
_SMALL_SHAPES = {"f64": 4, "s8": 16, "u8": 16, "s4": 32, "u4": 32, "b1": 128}
"""Depths of the shapes with eight rows."""
_ACCUMULATORS = {"f16": ("f16", "f32"), "e4m3": ("f16", "f32"), "e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",),
                 "s4": ("s32",), "u4": ("s32",), "b1": ("s32",), "f64": ("f64",)}  # fmt: skip
_MIXED = ({"e4m3", "e5m2"}, {"s8", "u8"}, {"s4", "u4"})
"""Types of A and B that may meet."""


@op("mma", "call", collective=True)
def _mma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit ``mma{.sp}.sync.aligned.shape.row.col.d.a.b.c`` without scales."""
    if any(m.startswith("kind") for m in mods.left):
        mods.fail("block-scaled forms and forms with .kind are not modelled")
    ordered = mods.flag("sp::ordered_metadata")
    sparse = mods.flag("sp") or ordered
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
    shapes = mma_sparse.SHAPES if sparse else _MMA_SHAPES
    if len(types) != 4 or {types[1], types[2]} - set(shapes):
        mods.fail("operand types are not modelled")
    out, kind_a, kind_b, _ = types
    small = not sparse and rows == 8 and _SMALL_SHAPES.get(kind_a) == depth
    if not small and (rows == 8 or depth not in shapes[kind_a]):
        mods.fail(f"shape {shape} of .{kind_a} is not modelled")
    same = kind_a == kind_b or {kind_a, kind_b} in _MIXED
    clamped = clamp and (kind_a == "b1" or out != "s32")
    if types[3] != out or out not in _ACCUMULATORS.get(kind_a, ("f32",)) or not same or clamped:
        mods.fail("this combination of types is not modelled")
    if sparse:
        return mma_sparse.emit(cg, ins, mods, depth, types[:3], clamp, ordered)
    return _dense(cg, ins, mods, warp_mma(rows, depth, kind_a, kind_b, out, clamp, bitwise == "xor"))


def _dense(cg: Codegen, ins: Instr, mods: Mods, form: WarpMma) -> None:
    """Emit a dense mma whose modifiers have been taken."""
    kind, flops = form.kinds[0], 2 * form.rows * 8 * form.depth
    d, a, b, c = mods.args(4)
    counts = [len(v.items) for v in (d, a, b, c)]
    if counts != [form.outputs, form.a_count, form.b_count, form.outputs]:
        mods.fail(f"takes {form.outputs}, {form.a_count}, {form.b_count} and {form.outputs} registers, has {counts}")

    def run(W: Warp, L: LaneSet, *values: Any) -> tuple:
        if L is not None:
            W.sync_error(ins, "mma needs all 32 lanes of the warp", L)
        W.launch.counters[f"flops mma {kind}"] += flops
        return form.multiply(list(values[::2]), list(values[1::2]))

    wide = "b64" if kind == "f64" else "b32"
    sources = [(v, wide) for v in (*a.items, *b.items, *c.items)]
    cg.call(run, sources, [(v, wide) for v in d.items])
