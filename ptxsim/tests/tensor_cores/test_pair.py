# ruff: noqa: E501 (lines of PTX are kept whole)
"""Tensor-memory allocation: by one block, and by the two blocks of a pair together (ISA 9.7.16.5, table 46; 9.7.16.7)."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
SETUP = (
    "mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, slot; setp.eq.u32 %odd, %r1, 1; setp.eq.u32 %even, %r1, 0;"
    "setp.eq.u32 %first, %r0, 0; ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r1, 16, %rd1;"
)
KEEP = "ld.shared.u32 %r5, [%r2]; @%first st.global.u32 [%rd1], %r5; ld.shared.u32 %r6, [%r2+4]; @%first st.global.u32 [%rd1+4], %r6;"


def alloc(columns: int, offset: int = 0, group: int = 2) -> str:
    """Return an allocation whose address goes to the slot."""
    return f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r2+{offset}], {columns};"


def free(columns: int, register: str = "%r5", group: int = 2) -> str:
    """Return a deallocation."""
    return f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {register}, {columns};"


RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"


def launch(
    code: str, mode: str = "late", blocks: int = 2, seed: int = 0, threads: int = 32, **options: object
) -> np.ndarray:
    """Run code in a cluster and return four words per block."""
    registers = ".reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .pred %odd; .reg .pred %even; .reg .pred %first; .reg .pred %p<4>; .shared .align 16 .b8 slot[16];"
    out = np.full((blocks, 4), 0xFFFFFFFF, "u4")
    text = (
        HEADER
        + f".visible .entry k(.param .u64 out)\n{{\n{registers}\n{SETUP} setp.lt.u32 %p0, %r0, 32; @%p0 st.shared.v4.u32 [%r2], {{0, 0, 0, 0}};{code}\nret;\n}}\n"
    )
    ptxsim.Module(text).launch("k", blocks, threads, [out], cluster=blocks, mode=mode, seed=seed, **options)
    return out


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("late", 0), ("random", 1), ("random", 2)])
def test_a_pair_gets_the_same_columns(mode: str, seed: int) -> None:
    code = alloc(128) + alloc(64, 4) + KEEP + SYNC + free(64, "%r6") + free(128) + RELINQUISH
    out = launch(code, mode, 4, seed)
    assert out[:, :2].tolist() == [[0, 128]] * 4


def test_each_block_waits_for_its_peer() -> None:
    """The odd block comes late: the even one passes its allocation only after the odd one has reached it."""
    code = (
        "@%even bra A; mov.u32 %r20, 0; S: add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, 800; @%p1 bra S; A:"
        "mov.u32 %r22, %clock;" + alloc(32) + "mov.u32 %r21, %clock;" + KEEP
        + "@%first st.global.u32 [%rd1+8], %r22; @%first st.global.u32 [%rd1+12], %r21;" + SYNC + free(32)
    )  # fmt: skip
    (_, _, even_before, even_after), (_, _, odd_before, odd_after) = launch(code).tolist()
    assert even_before < odd_before <= even_after
    assert even_before <= odd_after


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("@%odd bra E;" + alloc(32) + "E:" + SYNC, "tcgen05.alloc"),
        (alloc(32) + KEEP + "@%odd bra E;" + free(32) + "E:" + SYNC, "tcgen05.dealloc"),
        ("@%even bra E;" + RELINQUISH + "E:" + SYNC, "relinquish_alloc_permit"),
    ],
)
def test_a_missing_peer_is_a_deadlock(code: str, what: str) -> None:
    """The ISA lets each of the three block until the peer does the same: one that never does hangs the other."""
    with pytest.raises(ptxsim.DeadlockError, match=f"waits for {what} of the peer block"):
        launch(code)


def test_dealloc_before_the_barrier_on_one_side_hangs() -> None:
    """ISA table 48: non-deterministic on hardware, since dealloc may wait for the peer; here it always does."""
    code = alloc(32) + KEEP + "@%odd bra O;" + SYNC + free(32) + "bra.uni J; O:" + free(32) + SYNC + "J:"
    with pytest.raises(ptxsim.DeadlockError, match=r"tcgen05\.dealloc of the peer block"):
        launch(code)


def test_dealloc_after_the_barrier_may_be_followed_by_exit() -> None:
    """ISA table 47."""
    launch(alloc(512) + KEEP + SYNC + free(512))


def test_different_requests() -> None:
    code = "@%odd bra O;" + alloc(32) + "bra.uni J; O:" + alloc(64) + "J:"
    with pytest.raises(ptxsim.SyncError, match="different collective calls: alloc"):
        launch(code)


def test_two_pairs_are_independent() -> None:
    """Ranks 0 and 1 allocate before ranks 2 and 3, which wait for them."""
    code = (
        "setp.gt.u32 %p1, %r1, 1; @%p1 bra L;"
        + alloc(256)
        + SYNC.replace(".aligned", "")
        + "bra.uni J; L:"
        + SYNC.replace(".aligned", "")
        + alloc(64)
        + "J:"
        + KEEP
    )
    code += SYNC.replace(".aligned", "") + "@%p1 bra M;" + free(256) + "ret; M:" + free(64)
    assert launch(code, blocks=4)[:, 0].tolist() == [0] * 4


@pytest.mark.parametrize("group", [1, 2])
def test_allocation_waits_for_room(group: int) -> None:
    """Warp 1 asks for columns that warp 0 still holds, and gets them when they are freed."""
    code = (
        "setp.ge.u32 %p1, %r0, 32; @%p1 bra B;" + alloc(512, 0, group) + "bar.sync 1, 64; mov.u32 %r20, 0;"
        "S: add.u32 %r20, %r20, 1; setp.lt.u32 %p2, %r20, 300; @%p2 bra S; ld.shared.u32 %r5, [%r2];" + free(512, "%r5", group)
        + "mov.u32 %r21, %clock; @%first st.global.u32 [%rd1+8], %r21; bra.uni J; B: bar.sync 1, 64;" + alloc(32, 4, group)
        + "mov.u32 %r22, %clock; setp.eq.u32 %p3, %r0, 32; @%p3 st.global.u32 [%rd1+12], %r22; ld.shared.u32 %r6, [%r2+4];"
        + free(32, "%r6", group) + "J:"
    )  # fmt: skip
    out = launch(code, blocks=group, threads=64)
    assert (out[:, 3] >= out[:, 2]).all()


def test_without_room_and_nobody_to_free_is_a_deadlock() -> None:
    code = alloc(512, 0, 1) + alloc(32, 4, 1)
    with pytest.raises(ptxsim.DeadlockError, match="waits for 32 tensor-memory columns"):
        launch(code, blocks=1)


def test_counts_must_not_increase() -> None:
    code = alloc(32, 0, 1) + alloc(64, 4, 1) + KEEP + free(64, "%r6", 1) + free(32, "%r5", 1)
    with pytest.raises(ptxsim.SyncError, match="must not increase"):
        launch(code, blocks=1)
    with pytest.warns(ptxsim.StrictWarning, match="must not increase"):
        assert launch(code, blocks=1, strict=False)[0, :2].tolist() == [0, 32]


def test_a_pair_finds_columns_that_are_free_in_both() -> None:
    """Only production kernels mix the groups (a warning): the odd block already holds columns of its own."""
    own = f"@%even bra O; {alloc(64, 4, 1)} O:"
    code = own + alloc(32) + KEEP + SYNC + free(32) + f"@%even bra Q; {free(64, '%r6', 1)} Q:"
    with pytest.warns(ptxsim.StrictWarning, match="only one of them"):
        assert launch(code, strict=False)[:, 0].tolist() == [64, 64]


def test_a_pair_needs_a_peer() -> None:
    with pytest.raises(ptxsim.SyncError, match="does not exist"):
        launch(alloc(32), blocks=1)


@pytest.mark.parametrize(
    "code", ["@%first " + alloc(32, 0, 1), "@%first tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"]
)
def test_whole_warps_only(code: str) -> None:
    with pytest.raises((ptxsim.SyncError, ptxsim.DeadlockError), match=r"lanes|missing"):
        launch(code, blocks=1)


def test_base_of_the_first_allocation_is_an_option() -> None:
    assert launch(alloc(32, 0, 1) + KEEP + free(32, "%r5", 1), blocks=1, tmem_base=96)[0, 0] == 96


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("late", 0), ("random", 1), ("random", 2)])
def test_the_allocation_of_a_pair_orders_both_blocks(mode: str, seed: int) -> None:
    """One block copies into the columns of both right after its own allocation: the peer's has been made by then."""
    fill = (
        ".shared .align 1024 .b8 data[1024]; .shared .align 8 .b8 done[8]; mov.u32 %r10, data; mov.u32 %r11, done; mad.lo.u32 %r12, %r0, 4, %r10;"
        "mov.u32 %r13, 0; F: st.shared.u32 [%r12], 5; add.u32 %r12, %r12, 128; add.u32 %r13, %r13, 1; setp.lt.u32 %p1, %r13, 8; @%p1 bra F;"
        "@%first mbarrier.init.shared::cta.b64 [%r11], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;"
    )
    copy = (
        "ld.shared.u32 %r5, [%r2]; shr.u32 %r14, %r10, 4; cvt.u64.u32 %rd3, %r14; or.b64 %rd3, %rd3, 0x400000080000; @%odd bra W; @!%first bra W;"
        "tcgen05.cp.cta_group::2.4x256b [%r5], %rd3;"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r11], %h;"
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r11], 0; @!%p1 bra W; tcgen05.fence::after_thread_sync;"
    )
    code = ".reg .b16 %h; mov.b16 %h, 3;" + fill + SYNC + alloc(32) + copy + KEEP + SYNC + free(32)
    assert launch(code, mode, 2, seed)[:, 0].tolist() == [0, 0]
