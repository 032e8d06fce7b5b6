"""Emitters of bit-field, counting, permutation and dot-product instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic.undefined import moved
from ..parsing.ir import Imm, Instr
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op


def funnel(lo: np.ndarray, hi: np.ndarray, amount: np.ndarray, left: bool, clamp: bool) -> np.ndarray:
    """Shift the 64-bit pair and return one half."""
    n = (np.minimum(amount, 32) if clamp else amount & 31).astype("u8")
    pair = hi.astype("u8") << np.uint64(32) | lo
    return (((pair << n) >> np.uint64(32)) if left else pair >> n).astype("u4")


@op("shf")
def _shf(cg: Codegen, ins: Instr, mods: Mods) -> None:
    left = mods.choose("l", "r") == "l"
    clamp = mods.choose("clamp", "wrap") == "clamp"
    type_name = mods.type("b32")
    dst, a, b, c = mods.args(4)
    pairs = [cg.masked(a, type_name), cg.masked(b, type_name), cg.masked(c, "u32")]

    def run(x: np.ndarray, y: np.ndarray, n: np.ndarray) -> np.ndarray:
        return funnel(x, y, n, left, clamp)

    _move_bits(cg, dst, type_name, run, 2, pairs)


def _move_bits(
    cg: Codegen, dst: Any, type_name: str, function: Callable, count: int, pairs: list[tuple[str, str]]
) -> None:
    """Emit a function that moves the bits of its first ``count`` operands."""
    values = ", ".join(value for value, _ in pairs)
    cg.bitwise(dst, type_name, f"{cg.bind(function)}({values})", moved(function, count), pairs)


def popcount(x: np.ndarray) -> np.ndarray:
    """Count the bits set in every element."""
    return np.array([int(v).bit_count() for v in x], dtype="u4")


def leading_zeros(x: np.ndarray) -> np.ndarray:
    """Count leading zeros in every element."""
    return np.array([x.itemsize * 8 - int(v).bit_length() for v in x], dtype="u4")


def reverse_bits(x: np.ndarray) -> np.ndarray:
    """Reverse the bits of every element."""
    bits = x.itemsize * 8
    return np.array([int(f"{int(v):0{bits}b}"[::-1], 2) for v in x], dtype=x.dtype)


@op("popc clz")
def _count(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("b32", "b64")
    dst, a = mods.args(2)
    cg.out(dst, "u32", f"{cg.bind(popcount if ins.op == 'popc' else leading_zeros)}({cg.src(a, type_name)})")


@op("brev")
def _brev(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("b32", "b64")
    dst, a = mods.args(2)
    _move_bits(cg, dst, type_name, reverse_bits, 1, [cg.masked(a, type_name)])


@op("bfind")
def _bfind(cg: Codegen, ins: Instr, mods: Mods) -> None:
    shift = mods.flag("shiftamt")
    type_name = mods.type("u32", "u64", "s32", "s64")
    dst, a = mods.args(2)

    def run(x: np.ndarray) -> np.ndarray:
        values = [int(~v if v < 0 else v).bit_length() - 1 for v in x]
        top = x.itemsize * 8 - 1
        return np.array([0xFFFFFFFF if v < 0 else top - v if shift else v for v in values], dtype="u4")

    cg.out(dst, "u32", f"{cg.bind(run)}({cg.src(a, type_name)})")


@op("fns")
def _fns(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.type("b32")
    dst, mask, base, offset = mods.args(4)

    def run(masks: np.ndarray, bases: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return np.array(
            [_find_nth(int(m), int(b), int(o)) for m, b, o in zip(masks, bases, offsets, strict=False)], dtype="u4"
        )

    args = f"{cg.src(mask, 'b32')}, {cg.src(base, 'b32')}, {cg.src(offset, 's32')}"
    cg.out(dst, "b32", f"{cg.bind(run)}({args})")


def _find_nth(mask: int, base: int, offset: int) -> int:
    """Return the position of the n-th set bit from ``base`` (0xffffffff when there is none)."""
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    step, left, position = (1, offset, base) if offset > 0 else (-1, -offset, base)
    while 0 <= position < 32:
        if mask >> position & 1:
            left -= 1
            if not left:
                return position
        position += step
    return 0xFFFFFFFF


def _field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return position and length of a bit field: their low bytes, but whole for 64-bit fields, as an H200 has it."""
    if x.itemsize == 8:
        return np.minimum(start, np.uint32(255)), np.minimum(length, np.uint32(255))
    return start & 255, length & 255


def bit_extract(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """PTX bfe: a field, zero- or sign-extended."""
    bits = x.itemsize * 8
    result = []
    for value, first, count in zip(x, *_field(x, start, length), strict=False):
        raw, pos, n = int(value) & ((1 << bits) - 1), int(first), int(count)
        signed = x.dtype.kind == "i" and n > 0
        sign = raw >> min(pos + n - 1, bits - 1) & 1 if signed else 0
        field = raw >> pos & ((1 << n) - 1)
        have = min(n, max(bits - pos, 0))
        if sign:
            field |= ((1 << bits) - 1) & ~((1 << have) - 1)
        result.append(field & ((1 << bits) - 1))
    return np.array(result, dtype=f"u{x.itemsize}").view(x.dtype)


@op("bfe")
def _bfe(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("u32", "u64", "s32", "s64")
    dst, a, b, c = mods.args(4)
    pairs = [cg.masked(a, type_name), cg.masked(b, "u32"), cg.masked(c, "u32")]
    _move_bits(cg, dst, type_name, bit_extract, 1, pairs)


def bit_insert(x: np.ndarray, y: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """PTX bfi: put the low bits of ``x`` into ``y``."""
    full = (1 << x.itemsize * 8) - 1
    result = []
    for a, b, first, count in zip(x, y, *_field(x, start, length), strict=False):
        mask = (((1 << int(count)) - 1) << int(first)) & full
        result.append((int(b) & ~mask & full) | (int(a) << int(first) & mask))
    return np.array(result, dtype=x.dtype)


@op("bfi")
def _bfi(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("b32", "b64")
    dst, a, b, c, d = mods.args(5)
    pairs = [cg.masked(a, type_name), cg.masked(b, type_name), cg.masked(c, "u32"), cg.masked(d, "u32")]
    _move_bits(cg, dst, type_name, bit_insert, 2, pairs)


@op("bmsk")
def _bmsk(cg: Codegen, ins: Instr, mods: Mods) -> None:
    wrap = mods.choose("clamp", "wrap") == "wrap"
    mods.type("b32")
    dst, a, b = mods.args(3)

    def run(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        pos, size = (x & 31, y & 31) if wrap else (np.minimum(x, 32), np.minimum(y, 32))
        return ((((np.uint64(1) << size.astype("u8")) - 1) << pos.astype("u8")) & 0xFFFFFFFF).astype("u4")

    cg.out(dst, "b32", f"{cg.bind(run)}({cg.src(a, 'b32')}, {cg.src(b, 'b32')})")


@op("szext")
def _szext(cg: Codegen, ins: Instr, mods: Mods) -> None:
    wrap = mods.choose("clamp", "wrap") == "wrap"
    type_name = mods.type("u32", "s32")
    dst, a, b = mods.args(3)

    def run(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        keep = n & 31 if wrap else np.minimum(n, 32)
        return bit_extract(x, np.zeros_like(keep), keep)

    cg.out(dst, type_name, f"{cg.bind(run)}({cg.src(a, type_name)}, {cg.src(b, 'u32')})")


_NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)
_FIRST_BYTES = np.arange(0, 8 * 32, 8, dtype=np.uint32)[:, None]


def byte_permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX prmt in its default mode."""
    picks = selector[:, None] >> _NIBBLES
    pool = np.stack([a, b], 1).view("u1").reshape(-1)
    result = pool[(picks & 7) + _FIRST_BYTES[: len(a)]]
    signs = picks & 8
    if signs.any():
        result = np.where(signs, np.where(result & 128, np.uint8(255), np.uint8(0)), result)
    return result.view("u4")[:, 0]


def byte_choice(selector: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """PTX prmt by a literal selector that replicates no sign."""
    picks = np.array([selector >> at & 7 for at in (0, 4, 8, 12)])
    return lambda a, b: np.stack([a, b], 1).view("u1").take(picks, axis=1).view("u4")[:, 0]


_PRMT_TABLES = {
    "f4e": ([3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]),
    "b4e": ([5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]),
    "rc8": ([0] * 4, [1] * 4, [2] * 4, [3] * 4),
    "ecl": ([3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]),
    "ecr": ([0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]),
    "rc16": ([1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]),
}
"""Byte selectors (highest byte first) of the special modes, by the low two bits of the selector (ISA table of prmt)."""


@op("prmt")
def _prmt(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.type("b32")
    mode = mods.choose("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    dst, a, b, c = mods.args(4)

    def special(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
        codes = np.array([sum(s << 4 * (3 - i) for i, s in enumerate(row)) for row in _PRMT_TABLES[mode]], "u4")
        return byte_permute(x, y, codes[selector & 3])

    pairs = [cg.masked(a, "b32"), cg.masked(b, "b32")]
    if not mode and isinstance(c, Imm) and not c.value & 0x8888:
        _move_bits(cg, dst, "b32", byte_choice(c.value), 2, pairs)
        return
    _move_bits(cg, dst, "b32", special if mode else byte_permute, 2, [*pairs, cg.masked(c, "b32")])


def dot4(a: np.ndarray, b: np.ndarray, c: np.ndarray, va: str, vb: str) -> np.ndarray:
    """Four-way byte dot product with accumulation."""
    x, y = a.view(va).reshape(-1, 4).astype("i8"), b.view(vb).reshape(-1, 4).astype("i8")
    return (c + (x * y).sum(1)).astype(c.dtype)


def dot2(a: np.ndarray, b: np.ndarray, c: np.ndarray, va: str, vb: str, high: bool) -> np.ndarray:
    """Dot product of two 16-bit numbers with the low or the high two bytes, with accumulation."""
    x = a.view(va).reshape(-1, 2).astype("i8")
    y = b.view(vb).reshape(-1, 4)[:, 2:] if high else b.view(vb).reshape(-1, 4)[:, :2]
    return (c + (x * y.astype("i8")).sum(1)).astype(c.dtype)


@op("dp4a dp2a")
def _dot(cg: Codegen, ins: Instr, mods: Mods) -> None:
    high = ins.op == "dp2a" and mods.choose("lo", "hi") == "hi"
    first, second = mods.first_type(), mods.first_type()
    dst, a, b, c = mods.args(4)
    if {first, second} - {"u32", "s32"}:
        mods.fail("needs .u32 or .s32")
    out = "u32" if first == second == "u32" else "s32"
    width = 1 if ins.op == "dp4a" else 2
    views = [f"{'i' if first == 's32' else 'u'}{width}", "i1" if second == "s32" else "u1"]
    args = f"{cg.src(a, 'b32')}, {cg.src(b, 'b32')}, {cg.src(c, out)}, {views[0]!r}, {views[1]!r}"
    function = f"{cg.bind(dot4)}({args})" if ins.op == "dp4a" else f"{cg.bind(dot2)}({args}, {high})"
    cg.out(dst, out, function)
