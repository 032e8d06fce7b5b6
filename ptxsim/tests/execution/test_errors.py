# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Errors that the simulator must report: unknown instructions, faults, poison, races, misuse of barriers."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER, run

ONES = np.ones(32, "u4")


def body(code: str, *params: str) -> ptxsim.Module:
    """Return a module with one kernel ``k``."""
    declared = ", ".join(f".param .u64 {p}" for p in params)
    regs = ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .f32 %f<9>;"
    return ptxsim.Module(HEADER + f".visible .entry k({declared})\n{{\n{regs}\n{code}\nret;\n}}\n")


@pytest.mark.parametrize(
    "code",
    ["frobnicate.b32 %r1, %r2;", "add.sat.u32 %r1, %r2, %r3;", "add.u32.wrong %r1, %r2, %r3;", "add.u32 %r1, %r2;",
     "mma.sync.aligned.m16n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r4};", "tex.2d.v4.f32.f32 %r1, [%rd1];",
     "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "alloca.u64 %rd1, %rd2;"],
)  # fmt: skip
def test_unknown_instruction_names_kernel_and_line(code: str) -> None:
    with pytest.raises(ptxsim.UnknownInstruction, match=r"kernel k, line \d+: unknown instruction"):
        body(code).launch("k", 1, 32, [])


def test_out_of_bounds_by_one() -> None:
    code = "mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [a]; mad.wide.u32 %rd1, %r1, 4, %rd1; st.global.u32 [%rd1], %r1;"
    out = np.zeros(32, "u4")
    body(code, "a").launch("k", 1, 32, [out])
    assert out.tolist() == list(range(32))
    with pytest.raises(ptxsim.MemoryFault, match=r"lanes \[31\].*\n.*out of bounds"):
        body(code, "a").launch("k", 1, 32, [np.zeros(31, "u4")])


@pytest.mark.parametrize("part", [np.s_[::2], np.s_[::-1], np.s_[:, 1:]], ids=["gaps", "backwards", "columns"])
def test_arrays_that_are_not_contiguous(part: object) -> None:
    """A kernel that knows an address alone would touch other elements."""
    whole = np.arange(64, dtype="u4").reshape(16, 4)
    with pytest.raises(ptxsim.SimError, match=r"parameter a: got an array of shape .* expected a contiguous one"):
        body("ld.param.u64 %rd1, [a]; st.global.u32 [%rd1], 1;", "a").launch("k", 1, 1, [whole[part]])
    assert whole[0, 0] == 0
    body("ld.param.u64 %rd1, [a]; st.global.u32 [%rd1], 1;", "a").launch("k", 1, 1, [whole.T])
    assert whole[0, 0] == 1


def test_read_only_and_unmapped_memory() -> None:
    out = np.zeros(32, "u4")
    out.flags.writeable = False
    with pytest.raises(ptxsim.MemoryFault, match="read-only"):
        body("ld.param.u64 %rd1, [a]; st.global.u32 [%rd1], 1;", "a").launch("k", 1, 1, [out])
    with pytest.raises(ptxsim.MemoryFault, match="in no array"):
        body("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1];").launch("k", 1, 1, [])


def test_misaligned_vector() -> None:
    with pytest.raises(ptxsim.MemoryFault, match="misaligned for 16"):
        body("ld.param.u64 %rd1, [a]; ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1+8];", "a").launch(
            "k", 1, 1, [np.zeros(64, "u4")]
        )


def test_shared_bounds() -> None:
    code = ".shared .align 4 .b8 s[16]; mov.u32 %r1, s; st.shared.u32 [%r1+16], 1;"
    with pytest.raises(ptxsim.MemoryFault, match="outside"):
        body(code).launch("k", 1, 1, [])


def test_uninitialised_register_shared_and_local_memory() -> None:
    out = np.zeros(32, "u4")
    for code in (
        "add.u32 %d, %t5, 1;",
        ".shared .align 4 .b8 s[128]; mov.u32 %t1, s; ld.shared.u32 %d, [%t1];",
        ".local .align 4 .b8 l[16]; mov.u32 %t1, l; ld.local.u32 %d, [%t1];",
    ):
        with pytest.raises(ptxsim.PoisonError, match="global store"):
            run(code, [ONES], out)
    for guarded, what in (("mov.b32 %d, 1;", "global store"), ("st.global.u32 [%x8], 1;", "predicate")):
        with pytest.raises(ptxsim.PoisonError, match=what):
            run("setp.eq.u32 %p1, %t5, 0; mov.b32 %d, 0; @%p1 " + guarded, [ONES], out)
    with pytest.raises(ptxsim.PoisonError, match="address"):
        run("ld.global.u32 %d, [%x7];", [ONES], out)


def test_poison_that_is_never_stored_is_harmless() -> None:
    code = "add.u32 %t6, %t5, 1; setp.eq.u32 %p1, %t5, 0; selp.b32 %t7, %t6, 1, %p1; mov.b32 %d, 3;"
    assert run(code, [ONES], np.zeros(32, "u4")).tolist() == [3] * 32


def test_a_selection_takes_the_poison_of_what_it_selects() -> None:
    start = "setp.lt.u32 %p1, %t0, 16; mov.b32 %t1, %a; @!%p1 mov.b32 %t1, %t8;"
    assert run(start + "selp.b32 %d, %t1, 5, %p1;", [ONES], np.zeros(32, "u4")).tolist() == [1] * 16 + [5] * 16
    chosen = "sub.s32 %t2, 15, %t0; slct.b32.s32 %d, %t1, 5, %t2;"
    assert run(start + chosen, [ONES], np.zeros(32, "u4")).tolist() == [1] * 16 + [5] * 16
    for code in ("selp.b32 %d, 5, %t1, %p1;", "setp.eq.u32 %p2, %t1, 1; selp.b32 %d, 5, 5, %p2;"):
        with pytest.raises(ptxsim.PoisonError, match=r"lanes \[16, 17"):
            run(start + code, [ONES], np.zeros(32, "u4"))


def test_poison_moves_per_lane() -> None:
    code = (
        ".shared .align 4 .b8 s[128]; mov.u32 %t1, s; mad.lo.u32 %t1, %t0, 4, %t1; setp.lt.u32 %p1, %t0, 16;"
        "@%p1 st.shared.u32 [%t1], %a; bar.warp.sync -1; ld.shared.u32 %d, [%t1]; @!%p1 mov.b32 %d, 9;"
    )
    assert run(code, [ONES], np.zeros(32, "u4")).tolist() == [1] * 16 + [9] * 16


RACE = (
    ".shared .align 4 .b8 s[256]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mad.lo.u32 %r3, %r1, 4, %r2; st.shared.u32 [%r3], %r1;"
    "{sync} xor.b32 %r4, %r1, 32; mad.lo.u32 %r3, %r4, 4, %r2; ld.shared.u32 %r5, [%r3];"
)


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("random", 1), ("random", 2)])
def test_race_between_warps(mode: str, seed: int) -> None:
    with pytest.raises(ptxsim.SimError) as caught:
        body(RACE.replace("{sync}", "")).launch("k", 1, 64, [], mode=mode, seed=seed)
    assert caught.type is ptxsim.RaceError
    assert "shared byte" in str(caught.value)
    body(RACE.replace("{sync}", "bar.sync 0;")).launch("k", 1, 64, [], mode=mode, seed=seed)


def test_neighbouring_halves_are_no_race() -> None:
    code = (
        ".shared .align 4 .b8 s[256]; .reg .b16 %h; mov.u32 %r1, %tid.x; mov.u32 %r2, s; shr.u32 %r4, %r1, 5; and.b32 %r5, %r1, 31;"
        "mad.lo.u32 %r3, %r5, 4, %r2; mad.lo.u32 %r3, %r4, 2, %r3; cvt.u16.u32 %h, %r1; st.shared.u16 [%r3], %h; ld.shared.u16 %h, [%r3];"
    )
    body(code).launch("k", 1, 64, [])


def test_lanes_that_store_different_values_to_one_address() -> None:
    code = ".shared .align 4 .b8 s[16]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; st.shared.u32 [%r2], %r1;"
    with pytest.raises(ptxsim.RaceError, match="of one store write different values"):
        body(code).launch("k", 1, 32, [])
    with pytest.warns(ptxsim.StrictWarning, match=r"\[lane-store\]"):
        body(code).launch("k", 1, 32, [], allow={"lane-store"})


def test_lanes_that_store_one_nan_to_one_address() -> None:
    """Bits are compared, not numbers: a NaN is as good a value as any."""
    code = ".shared .align 4 .b8 s[16]; .reg .f32 %f; mov.f32 %f, 0f7fc00000; mov.u32 %r2, s; st.shared.f32 [%r2], %f;"
    body(code).launch("k", 1, 32, [])


def test_deadlock_reports_barriers() -> None:
    code = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 3, 64;"
    with pytest.raises(
        ptxsim.DeadlockError, match=r"(?s)waits for barrier 3.*barrier 3: warps \[0\] arrived, needs 64"
    ):
        body(code).launch("k", 1, 64, [])


MBAR = ".shared .align 8 .b8 m[8]; mov.u32 %r1, m; mbarrier.init.shared::cta.b64 [%r1], {n}; fence.mbarrier_init.release.cluster;"


def test_mbarrier_phases_and_tx_counts() -> None:
    code = MBAR.replace("{n}", "1") + (
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 1; mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;"
        "mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 64; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64;"
        "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; mbarrier.arrive.shared::cta.b64 %rd2, [%r1];"
        "mbarrier.test_wait.shared::cta.b64 %p4, [%r1], %rd2; selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2;"
        "selp.b32 %r4, 4, 0, %p3; selp.b32 %r5, 8, 0, %p4; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5;"
        "ld.param.u64 %rd1, [a]; st.global.u32 [%rd1], %r2;"
    )
    out = np.zeros(1, "u4")
    body(code, "a").launch("k", 1, 1, [out])
    assert out[0] == 1 + 4 + 8


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%r1], 3;", "3 arrivals with 2"),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 8;", "exits with"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r1+8];", "outside|no initialised mbarrier"),
        ("ld.shared.u32 %r2, [%r1];", "mbarrier"),
        ("st.shared.u32 [%r1], 0;", "mbarrier"),
        ("mbarrier.init.shared::cta.b64 [%r1], 1;", "initialised again|mbarrier"),
    ],
)
def test_mbarrier_misuse(code: str, why: str) -> None:
    with pytest.raises(ptxsim.SimError, match=why):
        body(MBAR.replace("{n}", "2") + code).launch("k", 1, 1, [])


def test_mbarrier_counts_that_are_illegal() -> None:
    with pytest.raises(ptxsim.SyncError, match="count"):
        body(MBAR.replace("{n}", "0")).launch("k", 1, 1, [])


def test_arrivals_that_nobody_waits_for_are_noted() -> None:
    code = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bar.arrive 1, 96; @%p1 bar.arrive 1, 96;"
    report = body(code).launch("k", 1, 64, [])
    assert "leftovers: barrier 1: warps [0] arrived, needs 96 threads" in str(report)


def test_deadlock_reports_the_cluster_barrier() -> None:
    code = "mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %r1, 0; @%p1 barrier.cluster.arrive; @%p1 barrier.cluster.wait; L: @!%p1 bar.sync 1, 64;"
    with pytest.raises(
        ptxsim.DeadlockError, match=r"cluster barrier: 1 warps arrived, 1 missing \(block rank 1 warp 0\)"
    ):
        body(code).launch("k", 2, 32, [], cluster=2)


def test_an_undeclared_register_is_named() -> None:
    with pytest.raises(ptxsim.PtxSyntaxError, match="k, line 7: unknown register '%nope'"):
        body("add.u32 %r1, %nope, 1;").program("k")


@pytest.mark.parametrize(
    ("directive", "shape", "why"),
    [
        ("", {"block": (1, 1, 65)}, "threads is not possible"),
        ("", {"smem": 227 * 1024 + 1}, "bytes of shared memory exceed"),
        ("", {"grid": 3, "cluster": 2}, "not a multiple of the cluster"),
        ("", {"grid": 32, "cluster": 32}, "cluster of 32 blocks"),
        (".maxntid 64", {"block": 96}, "exceed .maxntid"),
        (".reqntid 64", {"block": 32}, "differs from .reqntid"),
        (".reqnctapercluster 2", {"grid": 2, "cluster": 1}, "differs from .reqnctapercluster"),
        (".maxclusterrank 2", {"grid": 4, "cluster": 4}, "cluster of 4 blocks"),
    ],
)
def test_launches_that_the_driver_refuses(directive: str, shape: dict, why: str) -> None:
    text = HEADER + f".visible .entry k()\n{directive}\n{{ ret; }}\n"
    with pytest.raises(ptxsim.SimError, match=why):
        ptxsim.Module(text).launch("k", **{"grid": 1, "block": 32, "args": []} | shape)


def test_a_declared_cluster_is_the_default() -> None:
    out = np.zeros(4, "u4")
    code = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_nctarank; ld.param.u64 %rd1, [a]; mad.wide.u32 %rd1, %r1, 4, %rd1; st.global.u32 [%rd1], %r2;"
    regs = ".reg .b32 %r<9>; .reg .b64 %rd<9>;"
    text = (
        HEADER
        + f".visible .entry k(.param .u64 a)\n.explicitcluster .reqnctapercluster 2, 1, 1\n{{ {regs} {code} ret; }}\n"
    )
    ptxsim.Module(text).launch("k", 4, 1, [out])
    assert out.tolist() == [2] * 4


def test_trap_and_step_limit() -> None:
    with pytest.raises(ptxsim.KernelTrap):
        body("trap;").launch("k", 1, 1, [])
    with pytest.raises(ptxsim.StepLimitError):
        body("L: bra L;").launch("k", 1, 1, [], max_steps=1000)


def test_wrong_arguments() -> None:
    module = body("", "a")
    with pytest.raises(ptxsim.SimError, match="takes 1 arguments"):
        module.launch("k", 1, 1, [])
    with pytest.raises(ptxsim.SimError, match="no kernel"):
        module.launch("other", 1, 1, [])


@pytest.mark.parametrize(
    "text", [".version 8.8\nnonsense here", HEADER + ".visible .entry k()\n{ add.u32 %r1 %r2 [; }"]
)
def test_syntax_errors_name_the_line(text: str) -> None:
    with pytest.raises(ptxsim.SimError, match="line"):
        ptxsim.Module(text).launch("k", 1, 1, [])


def test_global_races_between_blocks() -> None:
    code = (
        "mov.u32 %r1, %ctaid.x; ld.param.u64 %rd1, [a]; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], 7;"
        "{release} @%p1 ret; {acquire} ld.global.u32 %r2, [%rd1];"
    )
    out = np.zeros(4, "u4")
    plain = code.replace("{release}", "").replace("{acquire}", "")
    with pytest.raises(ptxsim.RaceError, match="without synchronisation"):
        body(plain, "a").launch("k", 2, 1, [out], race_global=True)
    ordered = code.replace("{release}", "@%p1 st.release.gpu.global.u32 [%rd1+8], 1;").replace(
        "{acquire}", "W: ld.acquire.gpu.global.u32 %r3, [%rd1+8]; setp.eq.u32 %p2, %r3, 0; @%p2 bra W;"
    )
    body(ordered, "a").launch("k", 2, 1, [out], race_global=True, resident=2)


def test_a_body_is_parsed_when_its_kernel_is_used() -> None:
    """An error in one kernel of a library does not affect other kernels."""
    other = ".visible .entry other()\n{\nadd.u32 %r1, %nope, 1;\nret;\n}\n"
    module = ptxsim.Module(body("").ir.text + other)
    module.launch("k", 1, 32, [])
    with pytest.raises(ptxsim.PtxSyntaxError, match="other, line"):
        module.launch("other", 1, 32, [])
