# ruff: noqa: E501 (lines of PTX are kept whole)
"""Patterns of production kernels that the ISA allows: each caused a false alarm, an error or a hang once."""

from __future__ import annotations

import re

import numpy as np
import pytest

import ptxsim
from simtest import nvrtc
from simtest.runners import MODES, RUNNERS
from simtest.single import HEADER

REGISTERS = ".reg .b32 %r<60>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .f32 %f<9>; .reg .b16 %h<9>;"


def launch(code: str, words: int, threads: int, mode: str = "late", seed: int = 0, **options: object) -> np.ndarray:
    """Run code whose %rd1 is an array of words, %r0 the thread, %r1 the warp and %r2 the shared ``s``."""
    out = np.zeros(words, "u4")
    setup = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, s; ld.param.u64 %rd1, [out]; mad.wide.u32 %rd2, %r0, 4, %rd1;"
    text = f".visible .entry k(.param .u64 out)\n{{\n{REGISTERS} .shared .align 1024 .b8 s[4096];\n{setup}\n{code}\nret;\n}}\n"
    grid = options.pop("grid", 1)
    ptxsim.Module(HEADER + text, strict=options.pop("strict", True)).launch(
        "k", grid, threads, [out], mode=mode, seed=seed, **options
    )
    return out


# ---- wgmma-groups are of a warpgroup -------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_one_warp_waits_for_the_wgmma_of_its_warpgroup(mode: str, seed: int) -> None:
    """One thread releases a stage for all four warps, as CUTLASS does for clusters."""
    source = (nvrtc.KERNELS / "hopper_gemm.cu").read_text()
    old = "        if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty + 8 * s);\n"
    assert old in source
    new = "        if (threadIdx.x == 0)\n            for (int j = 0; j < 4; j++)\n                mbar_arrive(empty + 8 * s);\n"
    RUNNERS["hopper_gemm"](nvrtc.compile_ptx(source.replace(old, new), "sm_90a"), mode, seed)


def test_a_race_with_wgmma_names_the_warpgroup() -> None:
    source = (nvrtc.KERNELS / "hopper_gemm.cu").read_text()
    old = "        wgmma_wait<0>();\n        if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty + 8 * s);\n"
    new = "        if (threadIdx.x % 32 == 0)\n            mbar_arrive(empty + 8 * s);\n        wgmma_wait<0>();\n"
    assert old in source
    with pytest.raises(ptxsim.RaceError, match=r"wgmma of block \(0, 0, 0\) warpgroup 0 may still read"):
        RUNNERS["hopper_gemm"](nvrtc.compile_ptx(source.replace(old, new), "sm_90a"), "late", 0)


@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_more_than_eight_accumulators_in_flight(mode: str, seed: int) -> None:
    """Twelve products of ones with 1 to 12 in A, in one group and as one chain each: D is 8 or 16 times that."""
    count = 12
    fill = "mov.u32 %r5, 0x3F803F80; mad.lo.u32 %r6, %r0, 16, %r2; st.shared.v4.u32 [%r6], {%r5, %r5, %r5, %r5};"
    ready = "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;"
    descriptor = f"shr.u32 %r7, %r2, 4; cvt.u64.u32 %rd4, %r7; add.u64 %rd4, %rd4, {8 << 16 | 16 << 32};"
    declared = f".reg .f32 %d<{4 * count}>;"
    first = again = stores = ""
    for i in range(count):
        registers = ", ".join(f"%d{4 * i + j}" for j in range(4))
        a = np.array([i + 1] * 2, "f4").view("u4")[0] >> 16
        first += f"mov.b32 %r{20 + i}, {(int(a) << 16) | int(a)};"
        for scale in ("%p2", "%p3"):
            product = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{registers}}}, {{%r{20 + i}, %r{20 + i}, %r{20 + i}, %r{20 + i}}}, %rd4, {scale}, 1, 1, 0;"
            if scale == "%p2":
                first += product
            else:
                again += product
        stores += f"cvt.rzi.u32.f32 %r8, %d{4 * i + 3}; st.global.u32 [%rd2+{512 * i}], %r8;"
    flags = "setp.ne.u32 %p2, %r0, %r0; setp.eq.u32 %p3, %r0, %r0;"
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    out = launch(
        declared + fill + ready + descriptor + flags + first + again + end + stores, 128 * count, 128, mode, seed
    )
    assert out.reshape(count, 128).tolist() == [[32 * (i + 1)] * 128 for i in range(count)]


# ---- elect.sync ------------------------------------------------------------------------------------------------------
def test_the_lowest_lane_is_elected_unless_told_otherwise() -> None:
    code = "elect.sync %r3|%p1, -1; st.global.u32 [%rd2], %r3;"
    assert {int(launch(code, 32, 32, "random", seed)[0]) for seed in range(8)} == {0}
    assert len({int(launch(code, 32, 32, "random", seed, elect="random")[0]) for seed in range(8)}) > 2
    with pytest.raises(ValueError, match="elect"):
        launch(code, 32, 32, elect="last")


# ---- barriers that lanes reach one after another ------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize("count", ["", ", 64"])
def test_lanes_reach_an_unaligned_barrier_apart(mode: str, seed: int, count: str) -> None:
    """Odd and even lanes meet at two instructions of one barrier."""
    code = (
        "mad.lo.u32 %r3, %r0, 4, %r2; st.shared.u32 [%r3], %r0; and.b32 %r4, %r0, 1; setp.ne.u32 %p1, %r4, 0; @%p1 bra ODD;"
        f"barrier.sync 1{count}; mov.u32 %r6, 100; bra GO; ODD: barrier.sync 1{count}; mov.u32 %r6, 200; GO:"
        "xor.b32 %r5, %r0, 32; mad.lo.u32 %r3, %r5, 4, %r2; ld.shared.u32 %r7, [%r3]; add.u32 %r7, %r7, %r6; st.global.u32 [%rd2], %r7;"
    )
    expected = [(i ^ 32) + (200 if i & 1 else 100) for i in range(64)]
    assert launch(code, 64, 64, mode, seed).tolist() == expected
    with pytest.raises((ptxsim.DeadlockError, ptxsim.SyncError)):
        launch(code.replace("barrier.sync", "bar.sync"), 64, 64, mode, seed)


def test_lanes_of_a_warp_are_counted_once() -> None:
    twice = "setp.lt.u32 %p1, %r0, 16; @%p1 bra A; barrier.arrive 1, 64; A: barrier.arrive 1, 64;"
    with pytest.raises(ptxsim.SyncError, match="arrive twice at barrier 1 before its other lanes"):
        launch(twice, 1, 32)


@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_a_warp_arrives_and_then_waits_at_one_barrier(mode: str, seed: int) -> None:
    """Hardware counts arrivals: FlashAttention-3's scheduler barrier takes both from one warp."""
    both = "bar.arrive 1, 64; bar.sync 1, 64; st.global.u32 [%rd2], 5;"
    assert launch(both, 32, 32, mode, seed).tolist() == [5] * 32
    with pytest.raises(ptxsim.DeadlockError, match="needs 96 threads"):
        launch(both.replace("64", "96"), 32, 32, mode, seed)


def test_a_barrier_reduction_of_divergent_lanes() -> None:
    code = (
        "and.b32 %r4, %r0, 1; setp.ne.u32 %p1, %r4, 0; setp.lt.u32 %p2, %r0, 40; @%p1 bra ODD;"
        "barrier.red.popc.u32 %r6, 1, %p2; bra GO; ODD: barrier.red.popc.u32 %r6, 1, %p2; GO: st.global.u32 [%rd2], %r6;"
    )
    assert launch(code, 64, 64).tolist() == [40] * 64


# ---- mbarriers, stores of the same value --------------------------------------------------------------------------------
def test_an_mbarrier_is_initialised_again() -> None:
    """Undefined by the letter, so an error when strict; never a race when the same thread does it."""
    again = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 mbarrier.init.shared::cta.b64 [%r2], 32; bar.sync 0; mbarrier.arrive.shared::cta.b64 %rd3, [%r2];"
    with pytest.raises(ptxsim.SyncError, match=r"again without mbarrier\.inval"):
        launch(again, 1, 32)
    with pytest.warns(ptxsim.StrictWarning, match="again"):
        launch(again, 1, 32, strict=False)
    other = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; setp.eq.u32 %p1, %r0, 32; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;"
    with pytest.raises(ptxsim.RaceError, match="without synchronisation after its init"):
        launch(other, 1, 64, strict=False)


@pytest.mark.parametrize("space", ["shared", "global"])
def test_stores_of_one_value_by_several_warps(space: str) -> None:
    place = "%r2" if space == "shared" else "%rd1"
    text = f".visible .entry k(.param .u64 out)\n{{\n{REGISTERS} .shared .align 16 .b8 s[16];\nmov.u32 %r2, s; mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; ld.param.u64 %rd1, [out];\nst.{space}.u32 [{place}], VALUE; bar.sync 0; ld.{space}.u32 %r3, [{place}]; st.global.u32 [%rd1+4], %r3;\nret;\n}}\n"
    out = np.zeros(2, "u4")
    report = ptxsim.Module(HEADER + text.replace("VALUE", "7")).launch("k", 1, 128, [out], race_global=True)
    assert out[1] == 7
    assert any("stores what another warp has stored there" in note for note in report.notes)
    with pytest.raises(ptxsim.RaceError, match="writes after a write"):
        ptxsim.Module(HEADER + text.replace("VALUE", "%r1")).launch("k", 1, 128, [out], race_global=True)


# ---- registers ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_more_registers_when_others_have_given_theirs(mode: str, seed: int) -> None:
    """The first warpgroup asks before the other two have released: 168 each to start with, then 232, 232 and 40."""
    code = (
        "setp.lt.u32 %p1, %r0, 256; @%p1 bra MORE; mov.u32 %r3, 0; L: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 50; @%p2 bra L;"
        "setmaxnreg.dec.sync.aligned.u32 40; bra GO; MORE: setmaxnreg.inc.sync.aligned.u32 232; GO: st.global.u32 [%rd2], 1;"
    )
    assert launch(code, 384, 384, mode, seed).all()
    with pytest.raises(ptxsim.DeadlockError, match="waits for 240 registers per thread"):
        launch(code.replace("232", "240"), 384, 384, mode, seed)


# ---- tensor memory --------------------------------------------------------------------------------------------------------
ALLOC = (
    "setp.lt.u32 %p1, %r0, 32; @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; tcgen05.fence::before_thread_sync; bar.sync 0;"
    "tcgen05.fence::after_thread_sync; ld.shared.u32 %r10, [%r2]; shl.b32 %r11, %r1, 21; add.u32 %r11, %r11, %r10;"
)
FREE = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;"
FILLED = (
    ALLOC + "add.u32 %r12, %r0, 1000; shl.b32 %r13, %r12, 1;"
    "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r12, %r13}; tcgen05.wait::st.sync.aligned;"
)
WAIT = "tcgen05.wait::ld.sync.aligned;"


@pytest.mark.parametrize(("mode", "seed"), MODES)
def test_loaded_registers_may_be_packed_before_the_wait(mode: str, seed: int) -> None:
    """Compilers move what only moves registers ahead of wait::ld; what computes with them stays an error."""
    load = FILLED + "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r20, %r21}, [%r11];"
    packs = "mov.b64 %rd5, {%r20, %r21}; mov.b64 %rd6, %rd5; mov.b64 {%r22, %r23}, %rd6; mov.b32 {%h1, %h2}, %r21; mov.b32 %r24, {%h1, %h2};"
    use = "add.u32 %r22, %r22, %r23; add.u32 %r22, %r22, %r24; st.global.u32 [%rd2], %r22;"
    expected = [5 * (1000 + i) for i in range(128)]
    assert launch(load + packs + WAIT + use + FREE, 128, 128, mode, seed).tolist() == expected
    for broken in (
        load + packs + use + WAIT,
        load + use.replace("%r22, %r23", "%r20, %r21", 1) + WAIT,
        load + "add.u32 %r22, %r20, %r21; mov.u32 %r24, 0;" + WAIT + use,
    ):
        with pytest.raises(ptxsim.PoisonError, match="still pending"):
            launch(broken + FREE, 128, 128, mode, seed)


def test_undefined_cells_stay_undefined_in_packed_copies() -> None:
    code = (
        ALLOC
        + "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r20, %r21}, [%r11]; mov.b64 %rd5, {%r20, %r21};"
        + WAIT
        + "st.global.u64 [%rd1], %rd5;"
    )
    with pytest.raises(ptxsim.PoisonError):
        launch(code + FREE, 128, 128)


@pytest.mark.parametrize("address", ["%r10", "%r14", "%r15"])
def test_lane_fields_outside_the_quadrant_follow_one_rule(address: str) -> None:
    """An address of another quadrant, of none and of several: errors when strict, else the warp's own lanes."""
    other = "add.u32 %r14, %r1, 1; and.b32 %r14, %r14, 3; shl.b32 %r14, %r14, 21; add.u32 %r14, %r14, %r10; shl.b32 %r15, %r0, 16; and.b32 %r15, %r15, 0x600000; setp.eq.u32 %p2, %r0, 5; @%p2 add.u32 %r15, %r15, 0x200000; add.u32 %r15, %r15, %r10;"
    code = (
        FILLED
        + other
        + f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r20}}, [{address}];"
        + WAIT
        + "st.global.u32 [%rd2], %r20;"
        + FREE
    )
    with pytest.raises((ptxsim.MemoryFault, ptxsim.SyncError)):
        launch(code, 128, 128)
    with pytest.warns(ptxsim.StrictWarning, match=r"quadrant|different"):
        assert launch(code, 128, 128, strict=False).tolist() == list(range(1000, 1128))
    half = re.sub(r"\[%r10\]|\[%r14\]|\[%r15\]", "[%r16]", code).replace(other, other + "add.u32 %r16, %r11, 0x80000;")
    with pytest.raises(ptxsim.MemoryFault, match="not legal for shape"):
        launch(half, 128, 128, strict=False)
