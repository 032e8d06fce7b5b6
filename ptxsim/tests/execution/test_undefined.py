# ruff: noqa: E501 (lines of PTX are kept whole)
"""Undefined bits: which instructions make them defined, and which branches on them matter."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import run

ONES = np.ones(32, "u4")
"""Input of all kernels; %t8 is never written."""


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("and.b32 %d, %t8, -256; or.b32 %d, %d, 1; and.b32 %d, %d, -65281; or.b32 %d, %d, 512;"
         "and.b32 %d, %d, 0xffff; or.b32 %d, %d, 0x4030000;", 0x4030201),
        ("mov.u32 %t1, 7; prmt.b32 %d, %t8, %t1, 0x4444;", 0x7070707),
        ("mov.u32 %t1, 7; bfi.b32 %d, %t1, %t8, 0, 16; bfi.b32 %d, %t1, %d, 16, 16;", 0x70007),
        ("and.b32 %d, %t8, 0;", 0),
        ("or.b32 %d, %t8, -1;", 0xFFFFFFFF),
        ("xor.b32 %d, %t8, %t8;", 0),
        ("shl.b32 %d, %t8, 31; shl.b32 %d, %d, 1;", 0),
        ("shr.u32 %d, %t8, 31; shr.u32 %d, %d, 1;", 0),
        ("lop3.b32 %d, %t8, 0, 5, 0xea;", 5),
        ("mov.u32 %t1, 5; shf.l.wrap.b32 %d, %t8, %t1, 0;", 5),
        ("bfi.b32 %t1, 3, %t8, 0, 8; bfe.u32 %d, %t1, 0, 8;", 3),
        (".reg .b16 %h<3>; bfi.b32 %t1, 3, %t8, 0, 16; mov.b32 {%h1, %h2}, %t1; cvt.u32.u16 %d, %h1;", 3),
        (".reg .b16 %h<3>; bfi.b32 %t1, 3, %t8, 0, 16; cvt.u16.u32 %h1, %t1; cvt.u32.u16 %d, %h1;", 3),
        (".shared .align 4 .b8 s[4]; bfi.b32 %t1, 3, %t8, 0, 16; st.shared.u32 [s], %t1; st.shared.u8 [s+3], 1;"
         "ld.shared.u32 %t2, [s]; bfi.b32 %d, 2, %t2, 16, 8;", 0x1020003),
        (".local .align 4 .b8 l[4]; st.local.u16 [l], 3; ld.local.u32 %t2, [l]; and.b32 %d, %t2, 0xff;", 3),
    ],
)  # fmt: skip
def test_bits_that_are_defined(code: str, value: int) -> None:
    assert run(code, [ONES], np.zeros(32, "u4")).tolist() == [value] * 32


@pytest.mark.parametrize(
    "code",
    [
        "and.b32 %d, %t8, 1;",
        "or.b32 %d, %t8, 1;",
        "xor.b32 %d, %t8, %a;",
        "shl.b32 %d, %t8, 31;",
        "shr.s32 %t1, %t8, 31; shr.s32 %d, %t1, 31;",
        "shl.b32 %d, %a, %t8;",
        "prmt.b32 %d, %a, %t8, 0x4321;",
        "and.b32 %t1, %t8, 1; add.u32 %d, %t1, 1; and.b32 %d, %d, 0xfffffffe;",
        "bfi.b32 %t1, 3, %t8, 0, 24; prmt.b32 %d, %t1, 0, 0xbbb0;",
        "setp.lt.u32 %p1, %t0, 16; mov.b32 %d, 1; @%p1 and.b32 %d, %t8, 2;",
    ],
)
def test_bits_that_are_not(code: str) -> None:
    with pytest.raises(ptxsim.PoisonError, match="global store"):
        run(code, [ONES], np.zeros(32, "u4"))


UNSURE = "setp.eq.u32 %p1, %t8, 0; mov.u32 %d, 5; mov.u32 %t1, 1; "


@pytest.mark.parametrize(
    "code",
    [
        "@%p1 bra A; mov.u32 %t1, 2; A:",
        "@%p1 bra A; mov.u32 %t1, 2; bra B; A: add.u32 %t1, %t1, 1; B:",
        "@%p1 bra A; setp.eq.u32 %p2, %t8, 1; @%p2 bra B; mov.u32 %t1, 2; B: mov.u32 %t2, 3; A:",
        "@%p1 mov.u32 %t1, 2;",
    ],
)
def test_a_branch_that_decides_nothing_that_is_stored(code: str) -> None:
    """Attention kernels compare the rows beyond a sequence's end in this way."""
    assert run(UNSURE + code, [ONES], np.zeros(32, "u4")).tolist() == [5] * 32
    with pytest.raises(ptxsim.PoisonError, match="global store"):
        run(UNSURE + code + "add.u32 %d, %t1, 0;", [ONES], np.zeros(32, "u4"))


@pytest.mark.parametrize("code", ["bar.sync 0;", "st.shared.u32 [s], 1;", "bra C;", "exit;"])
def test_a_branch_that_decides_more(code: str) -> None:
    code = f".shared .align 4 .b8 s[4]; {UNSURE} @%p1 bra A; {code} A: mov.u32 %t1, 2; bra B; C: exit; B:"
    with pytest.raises(ptxsim.PoisonError, match="predicate"):
        run(code, [ONES], np.zeros(32, "u4"))


def test_only_lanes_of_the_undefined_value_are_undefined() -> None:
    code = "setp.lt.u32 %p1, %t0, 16; mov.b32 %t1, %a; @!%p1 mov.b32 %t1, %t8; setp.eq.u32 %p2, %t1, 1; mov.u32 %d, 7; @%p2 bra A; mov.u32 %d, 8; A: @!%p1 mov.u32 %d, 9;"
    assert run(code, [ONES], np.zeros(32, "u4")).tolist() == [7] * 16 + [9] * 16
