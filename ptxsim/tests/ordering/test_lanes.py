"""Races between lanes of one warp in shared memory (``race_lanes=True``): what is one, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

BODY = """.visible .entry k(.param .u64 out)
{{
.reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<4>; .reg .b16 %h<4>; .shared .align 16 .b8 s[512];
mov.u32 %r1, %tid.x; mov.u32 %r2, s; mad.lo.u32 %r3, %r1, 4, %r2; xor.b32 %r4, %r1, 1; mad.lo.u32 %r4, %r4, 4, %r2;
{code}
ld.param.u64 %d1, [out]; mad.wide.u32 %d1, %r1, 4, %d1; st.global.u32 [%d1], %r5;
ret;
}}
"""
STORE, LOAD, BARRIER = "st.shared.u32 [%r3], %r1;", "ld.shared.u32 %r5, [%r4];", "bar.warp.sync -1;"
VECTOR = "mad.lo.u32 %r6, %r1, 16, %r2; ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r6];"
HALF = (
    "setp.lt.u32 %p1, %r1, 16; @%p1 bra E; st.shared.u32 [%r3], %r1; E: bar.warp.sync -1; @!%p1 bra F;"
    "ld.shared.u32 %r5, [%r3+64]; bra G; F: mov.u32 %r5, %r1; G: mov.u32 %r5, %r5;"
)


def run(code: str, threads: int = 32, **options: object) -> np.ndarray:
    out = np.zeros(threads, "u4")
    ptxsim.Module(HEADER + BODY.format(code=code)).launch("k", 1, threads, [out], **options)
    return out


@pytest.mark.parametrize("barrier", [BARRIER, "bar.sync 0;"])
def test_a_barrier_orders_lanes(barrier: str) -> None:
    assert run(STORE + barrier + LOAD, race_lanes=True).tolist() == [lane ^ 1 for lane in range(32)]


@pytest.mark.parametrize("code", [
    STORE + LOAD,
    STORE + "shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;" + LOAD,
    STORE + VECTOR.replace("16, %r2", "0, %r2"),
    STORE + BARRIER + LOAD + "st.shared.u32 [%r3], 7;",
    STORE + "st.shared.u32 [%r4], 7; mov.u32 %r5, 0;",
    HALF.replace(BARRIER, ""),
], ids=["read", "shuffle", "vector", "write after read", "write after write", "apart"])  # fmt: skip
def test_races(code: str) -> None:
    run(code)  # what is looked for only on request
    with pytest.raises(ptxsim.RaceError, match=r"lane .* without a barrier between them"):
        run(code, race_lanes=True)


@pytest.mark.parametrize("code", [
    STORE + "ld.shared.u32 %r5, [%r3]; st.shared.u32 [%r3], 7;",
    STORE + BARRIER + LOAD + BARRIER + "st.shared.u32 [%r3], 7;",
    "add.u32 %r6, %r2, %r1; st.shared.u8 [%r6], %r1; ld.shared.u8 %r5, [%r6];",
    HALF,
], ids=["own word", "two barriers", "bytes of a word", "apart"])  # fmt: skip
def test_no_races(code: str) -> None:
    run(code, race_lanes=True)


def test_lanes_of_several_warps() -> None:
    run(STORE + "bar.sync 0;" + LOAD, 96, race_lanes=True)
    with pytest.raises(ptxsim.RaceError, match=r"lane 0 of block .* warp 0 reads what lane 1 wrote") as error:
        run(STORE + LOAD, 96, race_lanes=True)
    assert error.value.finding.other_at.text.startswith("st.shared.u32")
