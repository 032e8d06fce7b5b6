# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Integer, logic and shift instructions against formulas on Python integers, written from the PTX ISA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from simtest.single import EDGES32, run

RNG = np.random.default_rng(7)
A = EDGES32
B = np.roll(EDGES32, 11)
C = np.roll(EDGES32, 5)
M32 = (1 << 32) - 1


def s32(x: int) -> int:
    """Read 32 bits as a signed number."""
    x &= M32
    return x - (1 << 32) if x >> 31 else x


def trunc_div(x: int, y: int) -> int:
    """Divide toward zero."""
    q = abs(x) // abs(y)
    return -q if (x < 0) != (y < 0) else q


CASES: list[tuple[str, Callable]] = [
    ("add.u32 %d, %a, %b;", lambda a, b, c: a + b),
    ("sub.s32 %d, %a, %b;", lambda a, b, c: a - b),
    ("add.sat.s32 %d, %a, %b;", lambda a, b, c: max(min(s32(a) + s32(b), 2**31 - 1), -(2**31))),
    ("sub.sat.s32 %d, %a, %b;", lambda a, b, c: max(min(s32(a) - s32(b), 2**31 - 1), -(2**31))),
    ("mul.lo.s32 %d, %a, %b;", lambda a, b, c: a * b),
    ("mul.hi.u32 %d, %a, %b;", lambda a, b, c: (a * b) >> 32),
    ("mul.hi.s32 %d, %a, %b;", lambda a, b, c: (s32(a) * s32(b)) >> 32),
    ("mad.lo.u32 %d, %a, %b, %c;", lambda a, b, c: a * b + c),
    ("mad.hi.s32 %d, %a, %b, %c;", lambda a, b, c: ((s32(a) * s32(b)) >> 32) + s32(c)),
    ("mul24.lo.u32 %d, %a, %b;", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.hi.u32 %d, %a, %b;", lambda a, b, c: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) >> 16),
    ("sad.u32 %d, %a, %b, %c;", lambda a, b, c: c + abs(a - b)),
    ("sad.s32 %d, %a, %b, %c;", lambda a, b, c: c + abs(s32(a) - s32(b))),
    ("div.u32 %d, %a, %b;", lambda a, b, c: a // b if b else M32),
    ("rem.u32 %d, %a, %b;", lambda a, b, c: a % b if b else 0xFFFFFFFF),
    ("div.s32 %d, %a, %b;", lambda a, b, c: trunc_div(s32(a), s32(b)) if b else M32),
    ("rem.s32 %d, %a, %b;", lambda a, b, c: s32(a) - trunc_div(s32(a), s32(b)) * s32(b) if b else -1),
    ("min.s32 %d, %a, %b;", lambda a, b, c: min(s32(a), s32(b))),
    ("max.u32 %d, %a, %b;", lambda a, b, c: max(a, b)),
    ("neg.s32 %d, %a;", lambda a, b, c: -a),
    ("abs.s32 %d, %a;", lambda a, b, c: abs(s32(a))),
    ("and.b32 %d, %a, %b;", lambda a, b, c: a & b),
    ("or.b32 %d, %a, %b;", lambda a, b, c: a | b),
    ("xor.b32 %d, %a, %b;", lambda a, b, c: a ^ b),
    ("not.b32 %d, %a;", lambda a, b, c: ~a),
    ("cnot.b32 %d, %a;", lambda a, b, c: int(a == 0)),
    ("lop3.b32 %d, %a, %b, %c, 0xE8;", lambda a, b, c: (a & b) | (a & c) | (b & c)),
    ("lop3.b32 %d, %a, %b, %c, 0x1A;", lambda a, b, c: (a & b | c) ^ a),
    ("shl.b32 %d, %a, %b;", lambda a, b, c: a << b if b < 32 else 0),
    ("shr.u32 %d, %a, %b;", lambda a, b, c: a >> min(b, 32)),
    ("shr.s32 %d, %a, %b;", lambda a, b, c: s32(a) >> min(b, 31)),
    ("shl.b32 %d, %a, 31;", lambda a, b, c: a << 31),
    ("shr.s32 %d, %a, 31;", lambda a, b, c: s32(a) >> 31),
    ("shf.l.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    ("shf.r.clamp.b32 %d, %a, %b, %c;", lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("popc.b32 %d, %a;", lambda a, b, c: bin(a).count("1")),
    ("clz.b32 %d, %a;", lambda a, b, c: 32 - a.bit_length()),
    ("brev.b32 %d, %a;", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32 %d, %a;", lambda a, b, c: a.bit_length() - 1),
    ("bfind.s32 %d, %a;", lambda a, b, c: (~s32(a) if s32(a) < 0 else a).bit_length() - 1),
    ("bfind.shiftamt.u32 %d, %a;", lambda a, b, c: 32 - a.bit_length() if a else -1),
    ("bfe.u32 %d, %a, 4, 8;", lambda a, b, c: a >> 4 & 255),
    ("bfe.s32 %d, %a, 4, 8;", lambda a, b, c: (a >> 4 & 255) - (256 if a >> 11 & 1 else 0)),
    ("bfe.s32 %d, %a, 28, 8;", lambda a, b, c: s32(a) >> 28),
    ("bfi.b32 %d, %a, %b, 8, 12;", lambda a, b, c: (b & ~(0xFFF << 8)) | (a & 0xFFF) << 8),
    ("bmsk.clamp.b32 %d, 5, 9;", lambda a, b, c: 0x1FF << 5),
    ("szext.wrap.s32 %d, %a, 8;", lambda a, b, c: (a & 255) - (256 if a & 128 else 0)),
    ("prmt.b32 %d, %a, %b, 0x3715;", lambda a, b, c: sum(
        ((b << 32 | a) >> 8 * s & 255) << 8 * i for i, s in enumerate((5, 1, 7, 3)))),
    ("prmt.b32 %d, %a, %b, 0x8888;", lambda a, b, c: M32 if a & 128 else 0),
    ("prmt.b32.rc16 %d, %a, %b, 1;", lambda a, b, c: (a >> 16) * 0x10001),
    ("prmt.b32.b4e %d, %a, %b, 0;", lambda a, b, c: (a & 255) | (b >> 24) << 8 | (b >> 16 & 255) << 16 | (b >> 8 & 255) << 24),
    ("dp4a.u32.u32 %d, %a, %b, %c;", lambda a, b, c: c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))),
    ("selp.b32 %d, %a, %b, %p1;", None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "formula"), [c for c in CASES if c[1]], ids=[c[0] for c in CASES if c[1]])
def test_three_operands(code: str, formula: Callable) -> None:
    got = run(code, [A, B, C], np.zeros(32, "u4"))
    want = [formula(int(a), int(b), int(c)) & M32 for a, b, c in zip(A, B, C, strict=False)]
    assert [hex(v) for v in got.tolist()] == [hex(v) for v in want]


@pytest.mark.parametrize("signed", [False, True])
def test_wide_products(signed: bool) -> None:
    kind = "s32" if signed else "u32"
    got = run(f"mul.wide.{kind} %d, %a, %b;", [A, B], np.zeros(32, "u8"))
    read = s32 if signed else int
    assert got.tolist() == [(read(int(a)) * read(int(b))) & ((1 << 64) - 1) for a, b in zip(A, B, strict=False)]


def test_64_bit_high_product() -> None:
    x = RNG.integers(0, 1 << 63, 32, dtype="u8") * np.uint64(2) + np.uint64(1)
    y = RNG.integers(0, 1 << 63, 32, dtype="u8")
    got = run("mul.hi.u64 %d, %a, %b;", [x, y], np.zeros(32, "u8"))
    assert got.tolist() == [(int(a) * int(b)) >> 64 for a, b in zip(x, y, strict=False)]


def test_16_bit_arithmetic_wraps() -> None:
    x, y = A.astype("u2"), B.astype("u2")
    got = run("mad.lo.u16 %d, %a, %b, %b;", [x, y], np.zeros(32, "u2"))
    assert got.tolist() == [(int(a) * int(b) + int(b)) & 0xFFFF for a, b in zip(x, y, strict=False)]
    wide = run("mul.wide.s16 %d, %a, %b;", [x, y], np.zeros(32, "u4"))
    assert wide.view("i4").tolist() == [int(a) * int(b) for a, b in zip(x.view("i2"), y.view("i2"), strict=False)]


COMPARES = {
    "eq.u32": lambda a, b: a == b,
    "ne.s32": lambda a, b: a != b,
    "lt.u32": lambda a, b: a < b,
    "lt.s32": lambda a, b: s32(a) < s32(b),
    "ge.s32": lambda a, b: s32(a) >= s32(b),
    "hi.u32": lambda a, b: a > b,
    "ls.u32": lambda a, b: a <= b,
}


@pytest.mark.parametrize("name", COMPARES)
def test_setp_and_selp(name: str) -> None:
    y = B.copy()
    y[::4] = A[::4]
    got = run(
        f"setp.{name} %p1|%p2, %a, %b; selp.b32 %d, 1, 0, %p1; @%p2 add.u32 %d, %d, 2;", [A, y], np.zeros(32, "u4")
    )
    assert got.tolist() == [1 if COMPARES[name](int(a), int(b)) else 2 for a, b in zip(A, y, strict=False)]


def test_setp_combines_with_a_predicate() -> None:
    code = "setp.lt.u32 %p1, %a, %b; setp.gt.and.u32 %p2, %a, 100, !%p1; selp.b32 %d, 1, 0, %p2;"
    got = run(code, [A, B], np.zeros(32, "u4"))
    assert got.tolist() == [int(a > 100 and not a < b) for a, b in zip(A.tolist(), B.tolist(), strict=False)]


def test_register_pack_and_unpack() -> None:
    code = ".reg .b16 %h<2>; .reg .b64 %w; mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0}; mov.b64 %w, {%d, %b}; mov.b64 {%t1, %t2}, %w; xor.b32 %d, %t1, %t2;"
    got = run(code, [A, B], np.zeros(32, "u4"))
    assert got.tolist() == [((a >> 16 | a << 16) & M32) ^ b for a, b in zip(A.tolist(), B.tolist(), strict=False)]


def test_carry_chain_makes_128_bit_arithmetic() -> None:
    x = [RNG.integers(0, 1 << 63, 32, dtype="u8") * np.uint64(2) + np.uint64(1) for _ in range(4)]
    x[0][:4], x[2][:4] = np.uint64((1 << 64) - 1), np.uint64(1)
    low = run("add.cc.u64 %d, %a, %c;", x[:3], np.zeros(32, "u8"))
    high = run(".reg .b64 %z; add.cc.u64 %z, %a, %c; addc.u64 %d, %b, %e;", x, np.zeros(32, "u8"))
    difference = run(".reg .b64 %z; sub.cc.u64 %z, %a, %c; subc.u64 %d, %b, %e;", x, np.zeros(32, "u8"))
    wide = (1 << 128) - 1
    for i in range(32):
        a, b = (int(x[1][i]) << 64 | int(x[0][i])), (int(x[3][i]) << 64 | int(x[2][i]))
        assert int(high[i]) << 64 | int(low[i]) == (a + b) & wide
        assert int(difference[i]) == ((a - b) & wide) >> 64


def test_multiply_add_with_carry() -> None:
    got = run("mad.lo.cc.u32 %t1, %a, %b, %c; madc.hi.u32 %d, %a, %b, 0;", [A, B, C], np.zeros(32, "u4"))
    assert got.tolist() == [
        (a * b + c) >> 32 & M32 for a, b, c in zip(A.tolist(), B.tolist(), C.tolist(), strict=False)
    ]
