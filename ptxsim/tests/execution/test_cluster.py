# ruff: noqa: E501 (lines of PTX are kept whole)
"""Clusters: special registers, distributed shared memory, remote barriers, copies between blocks."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

REGS = (
    ".reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .pred %p<9>; .shared .align 128 .b8 s[256]; .shared .align 8 .b8 m[8];"
)
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def launch(code: str, out: np.ndarray, mode: str = "late", blocks: int = 4, cluster: int = 2) -> None:
    """Run code on blocks of 32 threads; ``%r0`` is the lane, ``%r1`` s, ``%r2`` m, ``%r3`` the rank, ``%rd1`` out."""
    text = (
        HEADER
        + f".visible .entry k(.param .u64 out)\n{{\n{REGS}\nmov.u32 %r0, %tid.x; mov.u32 %r1, s; mov.u32 %r2, m; mov.u32 %r3, %cluster_ctarank; ld.param.u64 %rd1, [out]; mov.u32 %r4, %ctaid.x;\n{code}\nret;\n}}\n"
    )
    ptxsim.Module(text).launch("k", blocks, 32, [out], cluster=cluster, mode=mode)


def test_special_registers() -> None:
    names = [
        "%ctaid.x",
        "%clusterid.x",
        "%cluster_ctaid.x",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%nclusterid.x",
        "%nctaid.x",
        "%ntid.x",
    ]
    code = "mad.wide.u32 %rd1, %r4, 32, %rd1; setp.eq.u32 %p1, %r0, 0; @!%p1 bra E;" + "".join(
        f"mov.u32 %r9, {n}; st.global.u32 [%rd1+{4 * i}], %r9;" for i, n in enumerate(names)
    )
    out = np.zeros((4, 8), "u4")
    launch(code + "E:", out)
    assert out.tolist() == [[b, b // 2, b % 2, b % 2, 2, 2, 4, 32] for b in range(4)]


def remote_tail() -> str:
    return (
        SYNC
        + "mad.lo.u32 %r8, %r0, 4, %r1; ld.shared.u32 %r9, [%r8]; mad.lo.u32 %r10, %r4, 32, %r0; mad.wide.u32 %rd2, %r10, 4, %rd1; st.global.u32 [%rd2], %r9;"
        + SYNC
    )


PEER = (
    SYNC
    + "xor.b32 %r5, %r3, 1; mad.lo.u32 %r6, %r0, 4, %r1; mapa.shared::cluster.u32 %r7, %r6, %r5; mad.lo.u32 %r11, %r4, 100, %r0;"
)


@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_store_to_the_peer(mode: str) -> None:
    out = np.zeros((4, 32), "u4")
    launch(PEER + "st.shared::cluster.u32 [%r7], %r11;" + remote_tail(), out, mode)
    assert out.tolist() == [[(b ^ 1) * 100 + t for t in range(32)] for b in range(4)]


def test_load_from_the_peer_through_generic_addresses() -> None:
    out = np.zeros((4, 32), "u4")
    code = (
        "mad.lo.u32 %r6, %r0, 4, %r1; mad.lo.u32 %r11, %r4, 100, %r0; st.shared.u32 [%r6], %r11;"
        + SYNC
        + "xor.b32 %r5, %r3, 1; cvt.u64.u32 %rd3, %r6; cvta.shared.u64 %rd3, %rd3; mapa.u64 %rd4, %rd3, %r5; ld.u32 %r9, [%rd4]; getctarank.u64 %r12, %rd4;"
        "mad.lo.u32 %r9, %r12, 10000, %r9; mad.lo.u32 %r10, %r4, 32, %r0; mad.wide.u32 %rd2, %r10, 4, %rd1; st.global.u32 [%rd2], %r9;"
        + SYNC
    )
    launch(code, out)
    assert out.tolist() == [[(b ^ 1) * 100 + t + 10000 * (b % 2 ^ 1) for t in range(32)] for b in range(4)]


def test_remote_atomics() -> None:
    out = np.zeros((4, 32), "u4")
    code = (
        "mad.lo.u32 %r6, %r0, 4, %r1; st.shared.u32 [%r6], 7;"
        + PEER
        + "red.shared::cluster.add.u32 [%r7], %r11;"
        + remote_tail()
    )
    launch(code, out)
    assert out.tolist() == [[(b ^ 1) * 100 + t + 7 for t in range(32)] for b in range(4)]


BARRIER = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;"
WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;"


@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_bulk_copy_to_the_peer(mode: str) -> None:
    out = np.zeros((4, 32), "u4")
    code = (
        BARRIER
        + PEER
        + "mad.lo.u32 %r8, %r0, 4, %r1; st.shared.u32 [%r8+128], %r11; fence.proxy.async.shared::cta; bar.warp.sync -1;"
        "mapa.shared::cluster.u32 %r12, %r1, %r5; mapa.shared::cluster.u32 %r13, %r2, %r5; add.u32 %r14, %r1, 128; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;"
        "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r12], [%r14], 128, [%r13];"
        + WAIT
        + remote_tail()
    )
    launch(code, out, mode)
    assert out.tolist() == [[(b ^ 1) * 100 + t for t in range(32)] for b in range(4)]


@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_red_async(mode: str) -> None:
    out = np.zeros((4, 32), "u4")
    code = (
        BARRIER
        + "mad.lo.u32 %r6, %r0, 4, %r1; st.shared.u32 [%r6], 5; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;"
        + PEER
        + "mapa.shared::cluster.u32 %r13, %r2, %r5;"
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r7], %r11, [%r13];"
        + WAIT
        + remote_tail()
    )
    launch(code, out, mode)
    assert out.tolist() == [[(b ^ 1) * 100 + t + 5 for t in range(32)] for b in range(4)]


def test_a_local_instruction_may_not_touch_the_peer() -> None:
    with pytest.raises(ptxsim.MemoryFault, match="outside the block's window"):
        launch(PEER + "st.shared.u32 [%r7], %r11;" + SYNC, np.zeros((4, 32), "u4"))


def test_access_to_an_exited_block() -> None:
    code = (
        PEER
        + "setp.eq.u32 %p3, %r3, 1; @%p3 bra E; W: ld.volatile.global.u32 %r9, [%rd1]; setp.lt.u32 %p4, %r20, 9; add.u32 %r20, %r20, 1; @%p4 bra W; st.shared::cluster.u32 [%r7], %r11; E:"
    )
    with pytest.raises(ptxsim.SyncError, match="already exited"):
        launch(code.replace("W: ld", "mov.u32 %r20, 0; W: ld"), np.zeros(32, "u4"), "early", 2)


def test_unordered_remote_accesses_race() -> None:
    code = PEER + "st.shared::cluster.u32 [%r7], %r11; ld.shared.u32 %r9, [%r6];" + SYNC
    with pytest.raises(ptxsim.RaceError):
        launch(code, np.zeros((4, 32), "u4"))


RED = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
INTO_FIRST = (
    BARRIER
    + "mad.lo.u32 %r6, %r0, 4, %r1; st.shared.u32 [%r6], 5; setp.eq.and.u32 %p3, %r3, 0, %p1; @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], BYTES;"
    + PEER
    + "mapa.shared::cluster.u32 %r7, %r6, 0; mapa.shared::cluster.u32 %r13, %r2, 0; setp.ne.u32 %p4, %r3, 0; setp.eq.u32 %p5, %r3, 0;"
)
"""Both blocks of a cluster address the first one's words (%r7) and mbarrier (%r13); %p4: not in the first block."""
AFTER = "@%p4 bra F;" + WAIT + "F:" + remote_tail()


@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_red_async_of_two_blocks_to_one_word(mode: str) -> None:
    """Reductions do not race with one another."""
    out = np.zeros((2, 32), "u4")
    launch(INTO_FIRST.replace("BYTES", "256") + f"{RED} [%r7], %r11, [%r13];" + AFTER, out, mode, 2)
    assert out.tolist() == [[5 + t + 100 + t for t in range(32)], [5] * 32]


@pytest.mark.parametrize("mode", ["early", "late", "random"])
@pytest.mark.parametrize(
    "code",
    [
        f"{RED} [%r7], %r11, [%r13]; @%p5 st.shared.u32 [%r6], 1;" + AFTER,
        f"@%p5 st.shared.u32 [%r6], 1; {RED} [%r7], %r11, [%r13];" + AFTER,
        f"{RED} [%r7], %r11, [%r13]; @%p5 ld.shared.u32 %r9, [%r6];" + AFTER,
        f"@%p4 st.shared::cluster.u32 [%r7], 1; @%p5 {RED} [%r7], %r11, [%r13];" + AFTER,
        f"@%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r11, [%r13]; @%p5 {RED} [%r7], %r11, [%r13];"
        + AFTER,
        f"{RED} [%r7], %r11, [%r13];" + remote_tail(),
    ],
    ids=["own store after", "own store before", "own load", "peer's store", "peer's st.async", "no wait"],
)
def test_red_async_races(code: str, mode: str) -> None:
    count = 256 if code.startswith(RED) or "st.async" in code else 128
    start = INTO_FIRST.replace("BYTES", str(count))
    with pytest.raises(ptxsim.RaceError):
        launch(start + code, np.zeros((2, 32), "u4"), mode, 2)


@pytest.mark.parametrize("mode", ["early", "late", "random"])
@pytest.mark.parametrize(
    "code",
    [
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r11, [%r13];" + AFTER,
        "@%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r11, [%r13]; @%p5 st.shared.u32 [%r6], 1;"
        + AFTER,
        "@%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r11, [%r13];" + remote_tail(),
    ],
    ids=["two st.async", "own store", "no wait"],
)
def test_st_async_races(code: str, mode: str) -> None:
    start = INTO_FIRST.replace("BYTES", "128" if code.startswith("@") else "256")
    with pytest.raises(ptxsim.RaceError):
        launch(start + code, np.zeros((2, 32), "u4"), mode, 2)


BULK = (
    BARRIER
    + "mad.lo.u32 %r8, %r0, 4, %r1; st.shared.u32 [%r8], 5; st.shared.u32 [%r8+128], %r0; fence.proxy.async.shared::cta;"
    + PEER
    + "mapa.shared::cluster.u32 %r12, %r1, %r5; mapa.shared::cluster.u32 %r13, %r2, %r5; add.u32 %r14, %r1, 128; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128; @%p1 COPY [%r12], [%r14], 128, [%r13];"
)
COPIES = (
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32",
)


@pytest.mark.parametrize("mode", ["early", "late", "random"])
@pytest.mark.parametrize("copy", COPIES, ids=["copy", "reduction"])
@pytest.mark.parametrize(
    "code",
    ["st.shared.u32 [%r8+128], 1;" + WAIT, "st.shared.u32 [%r8], 1;" + WAIT, "ld.shared.u32 %r9, [%r8];" + WAIT, ""],
    ids=["source rewritten", "target written", "target read", "no wait"],
)
def test_copies_between_blocks_race(copy: str, code: str, mode: str) -> None:
    out = np.zeros((2, 32), "u4")
    launch(BULK.replace("COPY", copy) + WAIT + remote_tail(), out, mode, 2)
    assert out.tolist() == [[t + 5 * ("reduce" in copy) for t in range(32)]] * 2
    with pytest.raises(ptxsim.RaceError):
        launch(BULK.replace("COPY", copy) + code + remote_tail(), out, mode, 2)
