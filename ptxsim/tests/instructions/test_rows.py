"""The golden tables' integer rows against formulas on Python integers, written from the PTX ISA."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from simtest.golden.known import compare
from simtest.golden.rows import RESULTS, Row


def signed(x: int, bits: int) -> int:
    """Read bits as a two's complement number."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int, bits: int) -> int:
    """Saturate to a signed range."""
    return max(min(x, (1 << (bits - 1)) - 1), -(1 << (bits - 1)))


def divided(x: int, y: int) -> int:
    """Divide toward zero."""
    q = abs(x) // abs(y)
    return -q if (x < 0) != (y < 0) else q


def found(x: int, bits: int, kind: str) -> int:
    """Return the position of the highest bit that is not the sign (-1: none)."""
    return (~x if kind == "s" and x < 0 else x).bit_length() - 1


def extracted(x: int, pos: int, length: int, bits: int, kind: str) -> int:
    """bfe, from the ISA's pseudo-code; a 64-bit field takes its operands whole, as an H200 does."""
    if bits == 32:
        pos, length = pos & 255, length & 255
    pos, length, raw = min(pos, 255), min(length, 255), x & ((1 << bits) - 1)
    sign = 0 if kind == "u" or length == 0 else raw >> min(pos + length - 1, bits - 1) & 1
    return sum((raw >> (pos + i) & 1 if i < length and pos + i < bits else sign) << i for i in range(bits))


def inserted(a: int, b: int, pos: int, length: int, bits: int) -> int:
    """bfi, from the ISA's pseudo-code; a 64-bit field takes its operands whole, as an H200 does."""
    if bits == 32:
        pos, length = pos & 255, length & 255
    for i in range(min(length, 255)):
        at = pos + i
        if at < bits:
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def nth(mask: int, base: int, offset: int) -> int:
    """fns, from the ISA's pseudo-code."""
    if offset == 0:
        return base if mask >> base & 1 else -1
    pos, left, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= pos < 32:
        if mask >> pos & 1:
            if not left:
                return pos
            left -= 1
        pos += step
    return -1


def permuted(a: int, b: int, c: int, mode: str) -> int:
    """prmt: selectors as in the ISA's table."""
    pool = [(b << 32 | a) >> 8 * i & 255 for i in range(8)]
    n = c & 3
    if not mode:
        picks = [c >> 4 * i & 15 for i in range(4)]
        return sum((pool[p & 7] if p < 8 else 255 * (pool[p & 7] >> 7)) << 8 * i for i, p in enumerate(picks))
    table = {
        "f4e": [n + i for i in range(4)],
        "b4e": [(n - i) % 8 for i in range(4)],
        "rc8": [n] * 4,
        "ecl": [max(i, n) for i in range(4)],
        "ecr": [min(i, n) for i in range(4)],
        "rc16": [2 * (n & 1) + (i & 1) for i in range(4)],
    }
    return sum(pool[p] << 8 * i for i, p in enumerate(table[mode]))


def dots(mods: list[str], a: int, b: int, c: int) -> int:
    """dp4a and dp2a."""
    kinds = [m[0] for m in mods if m in ("u32", "s32")]
    size, count = (16, 2) if "lo" in mods or "hi" in mods else (8, 4)
    skip = 2 if "hi" in mods else 0

    def part(x: int, width: int, index: int, kind: str) -> int:
        raw = x >> width * index & ((1 << width) - 1)
        return signed(raw, width) if kind == "s" else raw

    return c + sum(part(a, size, i, kinds[0]) * part(b, 8, i + skip, kinds[1]) for i in range(count))


def low24(x: int, kind: str) -> int:
    """Return the low 24 bits as a number."""
    return signed(x, 24) if kind == "s" else x & 0xFFFFFF


def pairwise(function: Callable[[int, int], int], kind: str) -> Callable[[int, int], int]:
    """Apply a function to both halves of packed 16-bit integers."""

    def run(a: int, b: int) -> int:
        halves = [((a >> s & 0xFFFF), (b >> s & 0xFFFF)) for s in (0, 16)]
        values = [function(*(signed(v, 16) if kind == "s" else v for v in pair)) & 0xFFFF for pair in halves]
        return values[0] | values[1] << 16

    return run


def formula(op: str, mods: list[str], bits: int, kind: str) -> Callable[..., int] | None:
    """Return what an instruction computes on numbers of its type (``kind``: s or u)."""
    part = next((m for m in mods if m in ("lo", "hi", "wide")), "lo")
    shift = bits if part == "hi" else 0
    wrap, mode = "wrap" in mods, next((m for m in mods if m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")), "")

    def multiplied(a: int, b: int, c: int = 0) -> int:
        value = (a * b >> shift) + c
        return clamp(value, 32) if "sat" in mods else value

    def product24(a: int, b: int, c: int = 0) -> int:
        value = low24(a, kind) * low24(b, kind)
        value = (value >> 16 if part == "hi" else value) + signed(c, 32)
        return clamp(value, 32) if "sat" in mods else value

    def funnel(a: int, b: int, c: int) -> int:
        amount = c & 31 if wrap else min(c, 32)
        return ((b << 32 | a) << amount) >> 32 if "l" in mods else (b << 32 | a) >> amount

    def limit(n: int) -> int:
        return n & 31 if wrap else min(n, 32)

    def lookup(a: int, b: int, c: int, table: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    relu = (lambda f: lambda a, b: max(f(a, b), 0)) if "relu" in mods else lambda f: f
    table: dict[str, Callable[..., int]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: clamp(a - b, 32) if "sat" in mods else a - b,
        "mul": multiplied,
        "mad": multiplied,
        "mul24": product24,
        "mad24": product24,
        "sad": lambda a, b, c: c + abs(a - b),
        "div": lambda a, b: divided(a, b) if b else -1,
        "rem": lambda a, b: a - divided(a, b) * b if b else -1,
        "abs": abs,
        "neg": lambda a: -a,
        "min": relu(min),
        "max": relu(max),
        "popc": lambda a: (a & ((1 << bits) - 1)).bit_count(),
        "clz": lambda a: bits - (a & ((1 << bits) - 1)).bit_length(),
        "brev": lambda a: int(f"{a:0{bits}b}"[::-1], 2),
        "bfind": lambda a: (
            (bits - 1 - found(a, bits, kind) if found(a, bits, kind) >= 0 else -1)
            if "shiftamt" in mods
            else found(a, bits, kind)
        ),
        "fns": lambda m, b, o: nth(m, b, signed(o, 32)),
        "bfe": lambda a, b, c: extracted(a, b, c, bits, kind),
        "bfi": lambda a, b, c, d: inserted(a, b, c, d, bits),
        "szext": lambda a, n: extracted(a, 0, limit(n & 0xFFFFFFFF), 32, kind),
        "bmsk": lambda a, b: (((1 << limit(b)) - 1) << limit(a)) & 0xFFFFFFFF,
        "dp4a": lambda a, b, c: dots(mods, a, b, c),
        "dp2a": lambda a, b, c: dots(mods, a, b, c),
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "cnot": lambda a: int(a == 0),
        "lop3": lookup,
        "shl": lambda a, n: a << n if n < bits else 0,
        "shr": lambda a, n: a >> min(n, bits),
        "shf": funnel,
        "prmt": lambda a, b, c: permuted(a, b, c, mode),
    }
    return table.get(op)


#: Operands that are read as unsigned 32-bit numbers whatever the instruction's type, by position.
UNSIGNED = {"shl": {1}, "shr": {1}, "bfe": {1, 2}, "bfi": {2, 3}, "szext": {1}, "lop3": {3}, "fns": {1, 2}}


def expected(row: Row, lane: dict[str, int]) -> int | None:
    """Return what a row should store in one lane (None: it is no single integer instruction)."""
    if row.code.count(";") > 1 or "|" in row.code or "%p" in row.code:
        return None
    opcode, *operands = [t.strip(",;") for t in row.code.split()]
    op, *mods = opcode.split(".")
    kinds = [m for m in mods if re.fullmatch(r"[usb](16|32|64)(x2)?", m)]
    if not kinds or op in ("cvt", "mov", "slct"):
        return None
    packed = kinds[-1].endswith("x2")
    kind, bits = kinds[-1][0], int(re.findall(r"\d+", kinds[-1])[0])
    function = formula(op, mods, bits, kind)
    if function is None:
        return None
    values = []
    for position, name in enumerate(operands[1:]):
        raw = lane[name[1:]] if name.startswith("%") else int(name, 0)
        wide = 2 * bits if "wide" in mods and position == 2 else bits
        unsigned = position in UNSIGNED.get(op, set()) or op in ("mul24", "mad24", "dp4a", "dp2a", "shf", "prmt")
        if packed or unsigned:
            values.append(raw & 0xFFFFFFFF if not packed else raw)
        else:
            values.append(signed(raw, wide) if kind == "s" else raw & ((1 << wide) - 1))
    result = pairwise(function, kind)(*values) if packed else function(*values)
    return result & ((1 << RESULTS[row.result]) - 1)


@pytest.mark.parametrize("table", ["integer", "logic"])
def test_rows_of_the_golden_table(table: str) -> None:
    known, wrong = compare(table, expected)
    assert wrong == []
    assert known >= {"integer": 110, "logic": 40}[table]
