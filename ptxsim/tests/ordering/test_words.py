# ruff: noqa: E501 (lines of PTX are kept whole)
"""The race detector remembers every byte of a word and every generation of a named barrier."""

from __future__ import annotations

import pytest

import ptxsim
from simtest.flags import MODES, launch

#: Accesses of halves of a word by warp 0, then one of warp 1 without synchronisation, and whether they touch.
HALVES = [
    ("st.shared.u16 [%r2], %h0; st.shared.u16 [%r2+2], %h0;", "ld.shared.u16 %h1, [%r2];", True),
    ("st.shared.u16 [%r2+2], %h0;", "ld.shared.u16 %h1, [%r2];", False),
    ("ld.shared.u16 %h1, [%r2]; ld.shared.u16 %h1, [%r2+2];", "st.shared.u16 [%r2], %h0;", True),
    ("ld.shared.u16 %h1, [%r2+2];", "st.shared.u16 [%r2], %h0;", False),
    ("ld.shared.u16 %h1, [%r2]; ld.shared.u16 %h1, [%r2+2];", "st.shared.u8 [%r2+1], %h0;", True),
    ("st.shared.u8 [%r2+1], %h0; st.shared.u8 [%r2+3], %h0; st.shared.u8 [%r2+2], %h0;", "st.shared.u16 [%r2], %h0;", True),
    ("st.shared.u8 [%r2+1], %h0; st.shared.u8 [%r2+3], %h0; st.shared.u8 [%r2+2], %h0;", "ld.shared.u8 %h1, [%r2];", False),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "touch"), HALVES)
def test_every_byte_of_a_word_counts(first: str, second: str, touch: bool) -> None:
    """A later access to other bytes of the word does not hide the first, neither of the same warp nor of another."""
    start = "setp.eq.u32 %p3, %r0, 0; @%p3 st.shared.u32 [%r2], 0; .reg .b16 %h<4>; mov.u16 %h0, 1; bar.sync 0; and.b32 %r4, %r0, 31; setp.ne.u32 %p4, %r4, 0; @%p4 ret;"
    spin = "mov.u32 %r9, 0; W: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 500; @%p2 bra W;"
    alone = f"{start} setp.ge.u32 %p1, %r0, 32; @%p1 bra R; {first} bra E; R: {spin} {second} E:"
    # Warp 2 has met warp 0, and then touches the rest of the word.
    between = f"{start} setp.ge.u32 %p1, %r0, 32; @%p1 bra R; {first} bar.sync 1, 64; bra E; R: setp.ge.u32 %p1, %r0, 64; @%p1 bra S; {spin} {second} bra E; S: bar.sync 1, 64; st.shared.u8 [%r2+3], %h0; E:"
    for code, threads in ((alone, 64), (between, 96)):
        for mode, seed in MODES:
            if touch:
                with pytest.raises(ptxsim.RaceError, match="shared byte 0"):
                    launch(code, 1, threads, mode, seed)
            else:
                launch(code, 1, threads, mode, seed)


def test_a_named_barrier_that_others_have_used_again() -> None:
    """Who waited for a generation gets what was published in it, even if the next one is over when it goes on."""
    code = (
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra A; setp.lt.u32 %p1, %r0, 64; @%p1 bra B; bar.sync 1, 64; bra E;"
        "A: bar.sync 1, 64; ld.shared.u32 %r5, [%r2]; mad.wide.u32 %rd2, %r0, 4, %rd1; st.global.u32 [%rd2], %r5; bra E;"
        "B: setp.eq.u32 %p2, %r0, 32; @%p2 st.shared.u32 [%r2], 7; bar.arrive 1, 64; bar.arrive 1, 64; E:"
    )
    # The warps take turns in their order: warp 0 waits, warp 1 arrives twice, warp 2 ends the second generation.
    for mode in ("early", "late"):
        assert launch(code, 1, 96, mode)[0] == 7
