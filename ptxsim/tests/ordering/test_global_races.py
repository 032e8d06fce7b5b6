# ruff: noqa: E501 (lines of PTX are kept whole)
"""The global side of asynchronous copies in the race check, and the groups of cp.async lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER, run

REGS = ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>;"
MODES = ["early", "late", "random"]
INIT = (
    ".shared .align 128 .b8 s[1024]; .shared .align 8 .b8 m[8]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, s; mov.u32 %r3, m; ld.param.u64 %rd1, [a];"
    "mbarrier.init.shared::cta.b64 [%r3], 1; fence.mbarrier_init.release.cluster; mov.b64 %rd2, tm; cvta.param.u64 %rd2, %rd2;"
    "mov.b32 %r9, 5; st.shared.v4.u32 [%r2], {%r9, %r9, %r9, %r9}; st.shared.v4.u32 [%r2+16], {%r9, %r9, %r9, %r9}; fence.proxy.async.shared::cta;"
)
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 32;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0; @!%p2 bra W;"
RAISE = "st.release.gpu.global.u32 [%rd1+128], 1;"
POLL = "P: ld.acquire.gpu.global.u32 %r5, [%rd1+128]; setp.eq.u32 %p3, %r5, 0; @%p3 bra P;"
FLUSH = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
ROLES = "setp.ne.u32 %p1, %r1, 0; @%p1 bra B; {first} bra E; B: {second} E:"

#: Loads read the 32 bytes at byte 64 of the array, stores write them (the tensor map covers the array's first 32 words).
LOADS = {
    "bulk": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1+64], 32, [%r3];",
    "tensor": "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2, {0, 2}], [%r3];",
}
STORES = {
    "bulk": "cp.async.bulk.global.shared::cta.bulk_group [%rd1+64], [%r2], 32;",
    "tensor": "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 2}], [%r2];",
}
REDUCTIONS = {
    "bulk": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1+64], [%r2], 32;",
    "tensor": "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd2, {0, 2}], [%r2];",
}


def launch(first: str, second: str, mode: str = "early", grid: int = 2) -> np.ndarray:
    """Run one thread a block: block 0 the first code, the others the second."""
    array = np.arange(64, dtype="u4")
    code = INIT + ROLES.replace("{first}", first).replace("{second}", second)
    text = HEADER + f".visible .entry k(.param .u64 a, .param .align 64 .b8 tm[128])\n{{\n{REGS}\n{code}\nret;\n}}\n"
    module = ptxsim.Module(text)
    tmap = ptxsim.encode_tiled("uint32", module.memory.map(array), [8, 4], [32], [8, 1])
    array[32:] = 0
    module.launch("k", grid, 1, [array, tmap], mode=mode, seed=3, resident=grid, race_global=True, max_steps=100_000)
    return array


def races(match: str, first: str, second: str, mode: str, grid: int = 2) -> None:
    """Expect a race at the bytes that the copies share."""
    with pytest.raises(ptxsim.RaceError, match=match):
        launch(first, second, mode, grid)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LOADS)
def test_loads(kind: str, mode: str) -> None:
    load = EXPECT + LOADS[kind] + WAIT
    launch(load, load, mode)
    launch("st.global.u32 [%rd1+96], 1;", load, mode)
    races("byte 64 of array", "st.global.u32 [%rd1+64], 1;", load, mode)
    # Written by the generic proxy in this kernel: a proxy fence of global memory is needed, by the writer or the reader.
    store = "st.global.u32 [%rd1+64], 1;"
    for fence in ("fence.proxy.async;", "fence.proxy.async.global;"):
        launch(store + fence + RAISE, POLL + load, mode)
        launch(store + RAISE, POLL + fence + load, mode)
    for fence in ("", "fence.proxy.async.shared::cta;"):
        races("no proxy fence makes it visible", store + fence + RAISE, POLL + load, mode)
    # Bytes that were read may be overwritten after the mbarrier has completed, not before.
    launch(load + RAISE, POLL + store, mode)
    races("byte 64 of array.*may still read", EXPECT + LOADS[kind] + RAISE + WAIT, POLL + store, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STORES)
def test_stores(kind: str, mode: str) -> None:
    store, read = STORES[kind] + FLUSH, "ld.global.u32 %r6, [%rd1+64]; st.global.u32 [%rd1+192], %r6;"
    assert launch(store + RAISE, POLL + read, mode)[48] == 5
    races("byte 64 of array", store, read, mode)
    races("byte 64 of array", store, store, mode)
    races("byte 64 of array", read, store, mode)
    partly = STORES[kind] + FLUSH.replace("wait_group 0", "wait_group.read 0")
    races("byte 64 of array.*reads after a write of bulk group", partly + RAISE + FLUSH, POLL + read, mode)
    races("byte 64 of array", STORES[kind] + RAISE + FLUSH, POLL + read, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind: str, mode: str) -> None:
    reduce = REDUCTIONS[kind] + FLUSH
    assert launch(reduce, reduce, mode, 3)[16:24].tolist() == [v + 15 for v in range(16, 24)]
    launch(reduce, "red.global.add.u32 [%rd1+64], 1;", mode)
    races("byte 64 of array", reduce, "st.global.u32 [%rd1+64], 1;", mode)
    races("byte 64 of array", reduce, STORES[kind] + FLUSH, mode)
    races("byte 64 of array", reduce, "ld.global.u32 %r6, [%rd1+64];", mode)


#: Additions to the word at byte 64, each with what waits for it.
ADDERS = {
    **{f"cp.reduce {name}": code + FLUSH for name, code in REDUCTIONS.items()},
    "red": "red.global.add.u32 [%rd1+64], 5;",
    "atom": "atom.global.add.u32 %r7, [%rd1+64], 5;",
    "red.release": "red.release.gpu.global.add.u32 [%rd1+64], 5;",
}
#: Accesses that are no reductions; asynchronous ones with a fence before them, and what waits for them.
OTHERS = {
    "load": "ld.global.u32 %r6, [%rd1+64];",
    "store": "st.global.u32 [%rd1+64], 1;",
    **{f"{name} load": "fence.proxy.async;" + EXPECT + code + WAIT for name, code in LOADS.items()},
    **{f"{name} store": "fence.proxy.async;" + code + FLUSH for name, code in STORES.items()},
    "cp.async": "cp.async.cg.shared.global [%r2], [%rd1+64], 16; cp.async.wait_all;",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", ADDERS)
@pytest.mark.parametrize("first", ADDERS)
def test_reductions_of_two_blocks_do_not_race(first: str, second: str, mode: str) -> None:
    assert launch(ADDERS[first], ADDERS[second], mode, 3)[16] == 16 + 3 * 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("adder", ADDERS)
def test_a_reduction_races_with_what_is_none(adder: str, other: str, mode: str) -> None:
    first, second = ADDERS[adder], OTHERS[other]
    races("byte 64 of array", first, second, mode)
    races("byte 64 of array", second, first, mode)
    # A flag orders them; what the generic proxy has added needs the fence that the asynchronous accesses begin with.
    launch(first + RAISE, POLL + second, mode)
    if other != "cp.async":
        launch(second + "fence.proxy.async;" + RAISE, POLL + first, mode)
    if adder in ("red", "atom") and "fence" in second:
        races("no proxy fence", first + RAISE, POLL + second.replace("fence.proxy.async;", ""), mode)


#: Blocks 0 and 2 add; block 0 signals, block 2 may; block 1 reads once it has the signals that it waits for.
TOLD = "red.release.gpu.global.add.u32 [%rd1+128], 1;"
READER = (
    "setp.eq.u32 %p4, %r1, 2; @%p4 bra T; P: ld.acquire.gpu.global.u32 %r5, [%rd1+128]; setp.lt.u32 %p3, %r5, {told}; @%p3 bra P;"
    "ld.global.u32 %r6, [%rd1+64]; st.global.u32 [%rd1+192], %r6; bra U; T: {add} U:"
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adder", ADDERS)
def test_every_reduction_must_be_ordered_before_a_read(adder: str, mode: str) -> None:
    """An ordered last reduction does not order the earlier ones: reductions do not order one another."""
    add = ADDERS[adder]
    both = READER.replace("{told}", "2").replace("{add}", add + TOLD)
    assert launch(add + TOLD, both, mode, 3)[48] == 16 + 10
    one = READER.replace("{told}", "1").replace("{add}", add)
    late = "mov.u32 %r8, 0; S: add.u32 %r8, %r8, 1; setp.lt.u32 %p5, %r8, 500; @%p5 bra S;" + add + TOLD
    if adder == "atom":  # it has seen the additions before it, which then precede what follows
        launch(late, one, "early", 3)
    else:
        races("byte 64 of array", add + TOLD, one, mode, 3)
        races("byte 64 of array", late, one, mode, 3)


@pytest.mark.parametrize("mode", MODES)
def test_what_lies_outside_the_tensor_is_not_touched(mode: str) -> None:
    out = STORES["tensor"].replace("{0, 2}", "{4, 2}") + FLUSH
    assert launch(out, "st.global.u32 [%rd1+96], 1;", mode)[24] == 1
    races("byte 80 of array", out, "st.global.u32 [%rd1+80], 1;", mode)


@pytest.mark.parametrize("mode", MODES)
def test_small_copies(mode: str) -> None:
    copy = "cp.async.cg.shared.global [%r2], [%rd1+64], 16;"
    wait = "cp.async.wait_all;"
    races("byte 64 of array", "st.global.u32 [%rd1+64], 1;", copy + wait, mode)
    launch(copy + wait + RAISE, POLL + "st.global.u32 [%rd1+64], 1;", mode)
    races("byte 64 of array.*may still read", copy + RAISE + wait, POLL + "st.global.u32 [%rd1+64], 1;", mode)
    launch(copy.replace("16;", "16, 8;") + wait, "st.global.u32 [%rd1+72], 1;", mode)


# ---- groups of cp.async ------------------------------------------------------------------------------------------
#: Lane %t0 copies a word; %t2 is its place in shared memory, %x0 in global memory; the source must be defined late.
COPY = ".shared .align 16 .b8 s[256]; mov.u32 %t1, s; mad.lo.u32 %t2, %t0, 4, %t1; setp.lt.u32 %p1, %t0, 16;"
ONE = "cp.async.ca.shared.global [%t2], [%x0], 4;"


def copied(code: str) -> list[int]:
    """Run code that copies the words 100, 101, ... and loads each lane's own."""
    source = np.arange(100, 132, dtype="u4")
    text = COPY + code + "ld.shared.u32 %d, [%t2];"
    return run(text, [source], np.zeros(32, "u4"), mode="late").tolist()


def test_groups_are_those_of_each_lane() -> None:
    everyone = list(range(100, 132))
    assert copied(ONE + "cp.async.commit_group; cp.async.wait_group 0;") == everyone
    assert copied("@%p1 " + ONE + "@!%p1 " + ONE + "cp.async.commit_group; cp.async.wait_group 0;") == everyone
    halves = "@%p1 bra A; {one} cp.async.commit_group; bra B; A: {one} cp.async.commit_group; B: bar.warp.sync -1; cp.async.wait_group {n};".replace(
        "{one}", ONE
    )
    assert copied(halves.replace("{n}", "0")) == everyone
    # Every lane has one group: none of them has to finish.
    with pytest.raises((ptxsim.PoisonError, ptxsim.RaceError)):
        copied(halves.replace("{n}", "1"))


def test_a_lane_waits_for_its_own_copies_only() -> None:
    half = ONE + "cp.async.commit_group; @%p1 cp.async.wait_group 0;"
    with pytest.raises((ptxsim.PoisonError, ptxsim.RaceError)):
        copied(half)
    assert copied(half + "@!%p1 cp.async.wait_all;") == list(range(100, 132))


def test_a_later_group_may_stay_in_flight() -> None:
    second = "add.u32 %t3, %t2, 128; cp.async.ca.shared.global [%t3], [%x0], 4; cp.async.commit_group;"
    start = ONE + "cp.async.commit_group; @!%p1 bra A;" + second + "A: cp.async.wait_group 1;"
    # The lanes without a second group have not waited for the first one.
    with pytest.raises((ptxsim.PoisonError, ptxsim.RaceError)):
        copied(start)
    assert copied(start + "@!%p1 cp.async.wait_group 0;") == list(range(100, 132))


def test_arrivals_wait_for_the_copies_of_their_lane() -> None:
    barrier = ".shared .align 8 .b8 m[8]; mov.u32 %t4, m; setp.eq.u32 %p2, %t0, 0; @%p2 mbarrier.init.shared::cta.b64 [%t4], {n}; bar.warp.sync -1;"
    arrive = "@!%p1 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%t4]; W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%t4], 0; @!%p3 bra W;"
    with pytest.raises((ptxsim.PoisonError, ptxsim.RaceError)):
        copied(barrier.replace("{n}", "16") + ONE + arrive)
    both = arrive.replace("@!%p1 ", "")
    assert copied(barrier.replace("{n}", "32") + ONE + both) == list(range(100, 132))


def test_a_source_size_beyond_the_copy_is_a_fault() -> None:
    with pytest.raises(ptxsim.MemoryFault, match="source size 8 exceeds the copy size 4"):
        copied("mov.u32 %t5, 8; cp.async.ca.shared.global [%t2], [%x0], 4, %t5; cp.async.wait_all;")
