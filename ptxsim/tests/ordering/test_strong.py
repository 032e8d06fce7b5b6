# ruff: noqa: E501 (lines of PTX are kept whole)
"""Flags in memory: which strong accesses and fences order other accesses, and which only seem to."""

from __future__ import annotations

import pytest

import ptxsim
from simtest.flags import MODES, launch

#: The writer stores data and raises a flag, the reader spins on the flag and loads the data.
SHARED = (
    "setp.eq.u32 %p3, %r0, 0; @%p3 st.shared.u32 [%r2+16], 0; bar.sync 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra R;"
    "st.shared.u32 [%r2], 7; {before} {raise} bra E; R: {poll} setp.eq.u32 %p2, %r3, 0; @%p2 bra R; {after} ld.shared.u32 %r4, [%r2]; st.global.u32 [%rd1], %r4; E:"
)
GLOBAL = (
    "setp.ne.u32 %p1, %r1, 0; @%p1 bra R; st.global.u32 [%rd1], 7; {before} {raise} bra E;"
    "R: {poll} setp.eq.u32 %p2, %r3, 0; @%p2 bra R; {after} ld.global.u32 %r4, [%rd1]; st.global.u32 [%rd1+4], %r4; E:"
)
#: Fence before, the flag's store, its poll, fence after, whether that orders the data within a block and in the grid.
FLAGS = [
    ("", "st.release.{s}.{m}.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", True),
    ("", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", False),
    ("", "st.release.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", "", False),
    ("fence.acq_rel.{s};", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", "fence.acq_rel.{s};", True),
    ("fence.acq_rel.{s};", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", "", False),
    ("", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", "fence.acq_rel.{s};", False),
    ("membar.gl;", "st.volatile.{m}.u32 [{f}], 1;", "ld.volatile.{m}.u32 %r3, [{f}];", "membar.gl;", True),
    ("", "red.release.{s}.{m}.add.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", True),
    ("", "red.{m}.add.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", False),
    ("fence.sc.{s};", "red.{m}.add.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", True),
    ("", "atom.acq_rel.{s}.{m}.exch.b32 %r9, [{f}], 1;", "atom.acq_rel.{s}.{m}.or.b32 %r3, [{f}], 0;", "", True),
    ("fence.acquire.{s};", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "", False),
    ("fence.release.{s};", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", "fence.acquire.{s};", True),
]  # fmt: skip


def flag_code(template: str, row: tuple, memory: str, scope: str) -> str:
    """Fill in the flag accesses."""
    place = "%r2+16" if memory == "shared" else "%rd1+32"
    names = dict(zip(("before", "raise", "poll", "after"), row[:4], strict=True))
    for name, text in names.items():
        template = template.replace(
            "{" + name + "}", text.replace("{s}", scope).replace("{m}", memory).replace("{f}", place)
        )
    return template


@pytest.mark.parametrize("row", FLAGS, ids=lambda r: f"{r[0]}{r[1]}{r[2]}{r[3]}")
@pytest.mark.parametrize(("memory", "scope"), [("shared", "cta"), ("global", "gpu")])
def test_flags(row: tuple, memory: str, scope: str) -> None:
    template, shape = (SHARED, (1, 64)) if memory == "shared" else (GLOBAL, (2, 1))
    code = flag_code(template, row, memory, scope)
    more = {} if memory == "shared" else {"race_global": True}
    for mode, seed in MODES:
        if row[4]:
            assert 7 in launch(code, *shape, mode, seed, **more)
        else:
            with pytest.raises(ptxsim.RaceError, match=r"(shared byte 0|byte 0 of array).*without synchronisation"):
                launch(code, *shape, mode, seed, **more)


@pytest.mark.parametrize(("scope", "fine"), [("cta", False), ("cluster", False), ("gpu", True), ("sys", True)])
def test_a_scope_must_include_the_other_block(scope: str, fine: bool) -> None:
    row = ("", "st.release.{s}.{m}.u32 [{f}], 1;", "ld.acquire.{s}.{m}.u32 %r3, [{f}];", "")
    code = flag_code(GLOBAL, row, "global", scope)
    if fine:
        launch(code, 2, 1, race_global=True)
    else:
        with pytest.raises(ptxsim.RaceError):
            launch(code, 2, 1, race_global=True)
    if scope == "cluster":
        launch(code, 2, 1, race_global=True, cluster=2)


def test_a_lock_orders_what_it_guards() -> None:
    lock = "L: atom.acquire.gpu.global.cas.b32 %r3, [%rd1+32], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra L;"
    work = "ld.global.u32 %r4, [%rd1]; add.u32 %r4, %r4, 1; st.global.u32 [%rd1], %r4;"
    for mode, seed in MODES:
        assert (
            launch(lock + work + "st.release.gpu.global.u32 [%rd1+32], 0;", 6, 1, mode, seed, race_global=True)[0] == 6
        )
        with pytest.raises(ptxsim.RaceError):
            launch(lock + work + "st.relaxed.gpu.global.u32 [%rd1+32], 0;", 6, 1, mode, seed, race_global=True)


def test_the_last_block_needs_fences_beside_its_counter() -> None:
    part = "mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r1; {fence} atom.global.add.u32 %r3, [%rd1+64], 1; setp.ne.u32 %p1, %r3, 3; @%p1 ret; {fence}"
    total = "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1]; add.u32 %r4, %r4, %r5; add.u32 %r6, %r6, %r7; add.u32 %r4, %r4, %r6; st.global.u32 [%rd1+128], %r4;"
    for mode, seed in MODES:
        assert launch((part + total).replace("{fence}", "membar.gl;"), 4, 1, mode, seed, race_global=True)[32] == 6
        with pytest.raises(ptxsim.RaceError):
            launch((part + total).replace("{fence}", ""), 4, 1, mode, seed, race_global=True)


def test_warps_of_one_block_race_in_global_memory() -> None:
    code = "mad.wide.u32 %rd2, %r0, 4, %rd1; and.b32 %r4, %r0, 31; mad.wide.u32 %rd3, %r4, 4, %rd1; st.global.u32 [%rd2], %r0; {sync} ld.global.u32 %r5, [%rd3]; setp.lt.u32 %p1, %r0, 32; @%p1 st.global.u32 [%rd2], %r5;"
    launch(code.replace("{sync}", "bar.sync 0;"), 1, 32, race_global=True)
    with pytest.raises(ptxsim.RaceError, match=r"byte 0 of array.*warp 1 reads after a write of block .* warp 0"):
        launch(code.replace("{sync}", ""), 1, 64, race_global=True)
    with pytest.raises(ptxsim.RaceError, match=r"warp 0 writes what block .* warp 1 may still read"):
        launch(code.replace("{sync}", "bar.sync 0;"), 1, 64, race_global=True)


def test_plain_accesses_race_with_atomics() -> None:
    code = "setp.ne.u32 %p1, %r1, 0; @%p1 bra R; {first} bra E; R: {second} E:"
    add, load, store, strong = (
        "red.global.add.u32 [%rd1], 1;",
        "ld.global.u32 %r4, [%rd1];",
        "st.global.u32 [%rd1], 5;",
        "ld.relaxed.gpu.global.u32 %r4, [%rd1];",
    )
    for first, second, race in (
        (add, add, False),
        (add, strong, False),
        (add, load, True),
        (load, add, True),
        (store, add, True),
        (store, strong, True),
        (load, load, False),
    ):
        text = code.replace("{first}", first).replace("{second}", second)
        if race:
            with pytest.raises(ptxsim.RaceError):
                launch(text, 2, 1, race_global=True)
        else:
            launch(text, 2, 1, race_global=True)


def test_lenient_runs_take_relaxed_flags_for_ordering() -> None:
    code = flag_code(
        SHARED, ("", "st.relaxed.{s}.{m}.u32 [{f}], 1;", "ld.relaxed.{s}.{m}.u32 %r3, [{f}];", ""), "shared", "cta"
    )
    with pytest.warns(ptxsim.StrictWarning, match="relaxed-order"):
        assert launch(code, 1, 64, strict=False)[0] == 7
    with pytest.warns(ptxsim.StrictWarning, match="relaxed-order"):
        assert launch(code, 1, 64, allow={"relaxed-order"})[0] == 7
    with pytest.raises(ptxsim.RaceError):
        launch(code, 1, 64, allow={"scope"})
    unordered = code.replace("ld.relaxed", "ld.weak").replace(".cta.shared.u32 %r3", ".shared.u32 %r3")
    with pytest.raises(ptxsim.RaceError):
        launch(unordered, 1, 64, strict=False)


FILL = "mad.lo.u32 %r3, %r0, 4, %r2; st.shared.u32 [%r3], %r0;"
CLUSTER = (
    FILL
    + "{fence} barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1; mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.u32 %r7, [%r6]; barrier.cluster.arrive; barrier.cluster.wait;"
)


def test_a_relaxed_cluster_arrival_needs_a_fence() -> None:
    launch(CLUSTER.replace("{fence}", "fence.acq_rel.cluster;"), 2, 32, cluster=2)
    for fence in ("", "fence.acq_rel.cta;"):
        with pytest.raises(ptxsim.RaceError):
            launch(CLUSTER.replace("{fence}", fence), 2, 32, cluster=2)
        with pytest.warns(ptxsim.StrictWarning, match="relaxed-order"):
            launch(CLUSTER.replace("{fence}", fence), 2, 32, cluster=2, strict=False)


MBARRIER = (
    "setp.eq.u32 %p3, %r0, 0; add.u32 %r9, %r2, 128; @%p3 mbarrier.init.shared::cta.b64 [%r9], 32; bar.sync 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra R; mad.lo.u32 %r3, %r0, 4, %r2;"
    "st.shared.u32 [%r3], %r0; {before} mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd2, [%r9]; bra E; R: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p2, [%r9], 0; @!%p2 bra R; {after} ld.shared.u32 %r4, [%r2]; E:"
)


def test_relaxed_mbarrier_operations_need_fences() -> None:
    fence = "fence.acq_rel.cta;"
    for before, after in ((fence, fence), (fence, ""), ("", fence), ("", "")):
        code = MBARRIER.replace("{before}", before).replace("{after}", after)
        if before and after:
            launch(code, 1, 64)
        else:
            with pytest.raises(ptxsim.RaceError):
                launch(code, 1, 64)


#: Warp 0's part, then what warp 1 does after it has (surely) happened; both before the block's barrier.
MASKED = [
    ("red.shared.add.u32 [%r2], 1;", "red.shared.add.u32 [%r2], 1; ld.shared.u32 %r4, [%r2];", "strong write or reduction"),
    ("red.shared.add.u32 [%r2], 1;", "red.shared.add.u32 [%r2], 1; st.shared.u32 [%r2], 0;", "strong write or reduction"),
    ("st.relaxed.gpu.shared.u32 [%r2], 1;", "st.relaxed.gpu.shared.u32 [%r2], 2; ld.shared.u32 %r4, [%r2];", "strong write or reduction"),
    ("ld.volatile.shared.u32 %r4, [%r2];", "st.shared.u32 [%r2], 1;", "may still read"),
    ("ld.acquire.gpu.shared.u32 %r4, [%r2];", "st.shared.u32 [%r2], 1;", "may still read"),
    ("ld.volatile.shared.u32 %r4, [%r2];", "st.volatile.shared.u32 [%r2], 1;", None),
    ("red.shared.add.u32 [%r2], 1;", "atom.shared.add.u32 %r4, [%r2], 1;", None),
    ("atom.cta.shared.add.u32 %r4, [%r2], 1;", "atom.cta.shared.add.u32 %r4, [%r2], 1;", None),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "message"), MASKED, ids=lambda x: str(x))
def test_a_strong_access_does_not_hide_another(first: str, second: str, message: str | None) -> None:
    """A warp's own strong access does not order it after another warp's access."""
    spin = "mov.u32 %r9, 0; W: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 500; @%p2 bra W;"
    code = (
        "setp.eq.u32 %p3, %r0, 0; @%p3 st.shared.u32 [%r2], 0; bar.sync 0; setp.ge.u32 %p1, %r0, 32; @%p1 bra R;"
        f"{first} bra E; R: {spin} {second} E: bar.sync 0; ld.shared.u32 %r5, [%r2]; setp.eq.u32 %p3, %r0, 63; @%p3 st.global.u32 [%rd1], %r5;"
    )
    if message is None:
        launch(code, 1, 64)
        return
    with pytest.raises(ptxsim.RaceError, match=message):
        launch(code, 1, 64)


def test_scopes_of_atomics_between_blocks() -> None:
    """Atomics of a block's scope race with another block's atomics, but not within the block."""
    code = "red.{s}.global.add.u32 [%rd1], 1;"
    for scope, blocks, legal in (("cta", 1, True), ("cta", 2, False), ("gpu", 2, True), ("sys", 2, True)):
        if legal:
            assert launch(code.replace("{s}", scope), blocks, 64, race_global=True)[0] == 64 * blocks
        else:
            with pytest.raises(ptxsim.RaceError, match="race at byte 0"):
                launch(code.replace("{s}", scope), blocks, 64, race_global=True)


def test_scopes_of_atomics_between_clusters() -> None:
    code = "red.cluster.global.add.u32 [%rd1], 1;"
    assert launch(code, 2, 32, cluster=2, race_global=True)[0] == 64
    with pytest.raises(ptxsim.RaceError, match="race at byte 0"):
        launch(code, 4, 32, cluster=2, race_global=True)


def test_a_fence_acquires_within_its_scope_only() -> None:
    """A relaxed read and a fence of the block do not acquire what another block released."""
    row = ("fence.acq_rel.gpu;", "st.relaxed.gpu.global.u32 [%rd1+32], 1;", "ld.relaxed.gpu.global.u32 %r3, [%rd1+32];")
    for scope in ("gpu", "cta"):
        code = flag_code(GLOBAL, (*row, f"fence.acq_rel.{scope};"), "global", "gpu")
        if scope == "gpu":
            assert 7 in launch(code, 2, 1, race_global=True)
        else:
            with pytest.raises(ptxsim.RaceError):
                launch(code, 2, 1, race_global=True)


#: The second block's update of the flag after it saw 1, and whether readers of 2 acquire the first block's release.
CHAINS = [
    ("atom.relaxed.gpu.global.add.u32 %r9, [%rd1+32], 1;", True),
    ("red.relaxed.gpu.global.add.u32 [%rd1+32], 1;", True),
    ("atom.relaxed.gpu.global.exch.b32 %r9, [%rd1+32], 2;", True),
    ("atom.relaxed.gpu.global.cas.b32 %r9, [%rd1+32], 1, 2;", True),
    ("st.relaxed.gpu.global.u32 [%rd1+32], 2;", False),
    ("st.release.gpu.global.u32 [%rd1+32], 2;", False),
    ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%rd1+32], 2;", True),
]  # fmt: skip
CHAIN = (
    "setp.eq.u32 %p1, %r1, 1; @%p1 bra M; setp.eq.u32 %p1, %r1, 2; @%p1 bra R; st.global.u32 [%rd1], 7; {raise} bra E;"
    "M: ld.relaxed.gpu.global.u32 %r3, [%rd1+32]; setp.eq.u32 %p2, %r3, 0; @%p2 bra M; {middle} bra E;"
    "R: ld.acquire.gpu.global.u32 %r3, [%rd1+32]; setp.ne.u32 %p2, %r3, 2; @%p2 bra R; ld.global.u32 %r4, [%rd1]; st.global.u32 [%rd1+4], %r4; E:"
)


@pytest.mark.parametrize("raised", ["st.release.gpu.global.u32 [%rd1+32], 1;", "red.release.gpu.global.add.u32 [%rd1+32], 1;",
                                    "atom.release.gpu.global.exch.b32 %r9, [%rd1+32], 1;"])  # fmt: skip
@pytest.mark.parametrize(("middle", "ordered"), CHAINS)
def test_release_sequences(raised: str, middle: str, ordered: bool) -> None:
    """A release goes on through read-modify-writes of others; a store of theirs ends it, if it acquired nothing."""
    code = CHAIN.replace("{raise}", raised).replace("{middle}", middle)
    relaxed = code.replace(raised, raised.replace(".release", ".relaxed"))
    for mode, seed in MODES:
        if ordered:
            assert launch(code, 3, 1, mode, seed, race_global=True)[1] == 7
        else:
            with pytest.raises(ptxsim.RaceError, match=r"byte 0 of array.*without synchronisation"):
                launch(code, 3, 1, mode, seed, race_global=True)
        with pytest.raises(ptxsim.RaceError, match=r"byte 0 of array.*without synchronisation"):
            launch(relaxed, 3, 1, mode, seed, race_global=True)


def test_a_release_pattern_goes_on_with_strong_writes_of_its_thread() -> None:
    """ISA, release patterns: a release followed by a strong write to the same place, in program order."""
    row = (
        "",
        "st.release.{s}.{m}.u32 [{f}], 1; st.relaxed.{s}.{m}.u32 [{f}], 2;",
        "ld.acquire.{s}.{m}.u32 %r3, [{f}];",
        "",
    )
    spin = "setp.eq.u32 %p2, %r3, 0;"
    code = flag_code(GLOBAL, row, "global", "gpu").replace(
        spin, spin.replace("eq.u32 %p2, %r3, 0", "ne.u32 %p2, %r3, 2")
    )
    for mode, seed in MODES:
        assert 7 in launch(code, 2, 1, mode, seed, race_global=True)
        with pytest.raises(ptxsim.RaceError):
            launch(code.replace("st.release", "st.relaxed"), 2, 1, mode, seed, race_global=True)
