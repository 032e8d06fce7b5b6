# ruff: noqa: E501 (lines of PTX are kept whole)
"""Tensor maps that a kernel edits, copies with a byte mask, lines that it discards."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

REGS = ".reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<9>; .reg .b16 %h<4>;"
START = (
    ".shared .align 128 .b8 s[1024]; .shared .align 128 .b8 e[128]; .shared .align 8 .b8 m[8]; mov.u32 %r0, %tid.x; mov.u32 %r1, s; mov.u32 %r2, e; mov.u32 %r3, m;"
    "ld.param.u64 %rd1, [array]; ld.param.u64 %rd2, [out]; ld.param.u64 %rd3, [place]; setp.eq.u32 %p1, %r0, 0;"
    "@%p1 mbarrier.init.shared::cta.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.warp.sync -1; mad.lo.u32 %r4, %r0, 4, %r2;"
)
PUBLISH = "bar.warp.sync -1; tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd3], [%r2], 128;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;"
LOAD = (
    "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {size}; @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd3, {{x}, 1}], [%r3];"
    "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0; @!%p2 bra W; mad.lo.u32 %r5, %r0, 4, %r1; ld.shared.u32 %r6, [%r5]; mad.wide.u32 %rd4, %r0, 4, %rd2; st.global.u32 [%rd4], %r6;"
)
BLANK = "st.shared.u32 [%r4], 0;"
COPY = "mul.wide.u32 %rd5, %r0, 4; mov.u64 %rd6, tm; cvta.param.u64 %rd6, %rd6; add.u64 %rd6, %rd6, %rd5; ld.u32 %r6, [%rd6]; st.shared.u32 [%r4], %r6;"


def launch(code: str, array: np.ndarray, threads: int = 32, **more: object) -> np.ndarray:
    """Run a warp; ``tm`` is a map of 8 x 6 words with boxes of 8 x 4."""
    out, place = np.zeros(32, "u4"), np.zeros(128, "u1")
    params = ".param .align 64 .b8 tm[128], .param .u64 array, .param .u64 place, .param .u64 out"
    module = ptxsim.Module(HEADER + f".visible .entry k({params})\n{{\n{REGS} {START}\n{code}\nret;\n}}\n")
    tmap = ptxsim.encode_tiled("uint32", module.memory.map(array), [8, 6], [32], [8, 4])
    module.launch("k", 1, threads, [tmap, array, place, out], **more)
    return out


def edit(fields: str, start: str = COPY, size: int = 128, x: int = 0, acquire: str = ACQUIRE) -> str:
    """Return code that edits a copy of the map, publishes it and loads a tile at row 1."""
    each = "".join(f"@%p1 tensormap.replace.tile.{f.strip()};" for f in fields.split(";") if f.strip())
    return (
        start
        + "bar.warp.sync -1;"
        + each
        + PUBLISH
        + acquire
        + LOAD.replace("{size}", str(size)).replace("{x}", str(x))
    )


ARRAY = np.arange(1000, 1064, dtype="u4")
ROWS = ARRAY[:48].reshape(6, 8)
FIELDS = [
    ("", 0, ROWS[1:5]),
    ("global_address.shared::cta.b1024.b64 [%r2], %rd1", 0, ROWS[1:5]),
    ("global_dim.shared::cta.b1024.b32 [%r2], 1, 3", 0, np.concatenate([ROWS[1:3], np.zeros((2, 8))])),
    ("global_dim.shared::cta.b1024.b32 [%r2], 0, 5", 0, np.where(np.arange(8) < 5, ROWS[1:5], 0)),
    ("global_stride.shared::cta.b1024.b64 [%r2], 0, 16", 0, [ARRAY[4 * r : 4 * r + 8] for r in range(1, 5)]),
    ("element_stride.shared::cta.b1024.b32 [%r2], 1, 2; box_dim.shared::cta.b1024.b32 [%r2], 1, 8; global_dim.shared::cta.b1024.b32 [%r2], 1, 8", 0,
     ARRAY.reshape(8, 8)[1::2]),
    ("elemtype.shared::cta.b1024.b32 [%r2], 7; fill_mode.shared::cta.b1024.b32 [%r2], 1", 4,
     np.concatenate([ROWS[1:5, 4:], np.full((4, 4), 0x7FF77FF7)], 1)),
    ("swizzle_mode.shared::cta.b1024.b32 [%r2], 1", 0,
     [[*row[4:], *row[:4]] if (32 * r) >> 7 & 1 else row for r, row in enumerate(ROWS[1:5])]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "x", "want"), FIELDS, ids=[f[0] for f in FIELDS])
def test_each_field(fields: str, x: int, want: object) -> None:
    got = launch(edit(fields, x=x), ARRAY)
    assert got.tolist() == np.asarray(want).astype("u4").reshape(-1).tolist()


def test_a_map_made_from_nothing() -> None:
    fields = (
        "global_address.shared::cta.b1024.b64 [%r2], %rd1; rank.shared::cta.b1024.b32 [%r2], 1; box_dim.shared::cta.b1024.b32 [%r2], 0, 8; box_dim.shared::cta.b1024.b32 [%r2], 1, 4;"
        "global_dim.shared::cta.b1024.b32 [%r2], 0, 8; global_dim.shared::cta.b1024.b32 [%r2], 1, 6; global_stride.shared::cta.b1024.b64 [%r2], 0, 32;"
        "element_stride.shared::cta.b1024.b32 [%r2], 0, 1; element_stride.shared::cta.b1024.b32 [%r2], 1, 1; elemtype.shared::cta.b1024.b32 [%r2], 2;"
        "interleave_layout.shared::cta.b1024.b32 [%r2], 0; swizzle_mode.shared::cta.b1024.b32 [%r2], 0; fill_mode.shared::cta.b1024.b32 [%r2], 0"
    )
    assert launch(edit(fields, BLANK), ARRAY).tolist() == ROWS[1:5].reshape(-1).tolist()


def test_in_global_memory_and_generic_addresses() -> None:
    code = (
        COPY
        + PUBLISH
        + "@%p1 tensormap.replace.tile.global_dim{space}.b1024.b32 [%rd3], 1, 2;"
        + ACQUIRE
        + LOAD.replace("{size}", "128").replace("{x}", "0")
    )
    for space in (".global", ""):
        assert launch(code.replace("{space}", space), ARRAY).tolist() == [*ROWS[1].tolist(), *[0] * 24]


def test_an_edited_map_needs_an_acquiring_fence() -> None:
    with pytest.raises(ptxsim.SyncError, match=r"edited; no fence.proxy.tensormap::generic.acquire"):
        launch(edit("", acquire=""), ARRAY)
    with pytest.raises(ptxsim.SyncError, match="edited"):
        launch(edit("", acquire="fence.proxy.tensormap::generic.release.gpu;"), ARRAY)
    with pytest.warns(ptxsim.StrictWarning):
        launch(edit("", acquire=""), ARRAY, strict=False)


@pytest.mark.parametrize("mode", ["early", "late"])
def test_another_warps_fence_counts_behind_a_barrier(mode: str) -> None:
    """The fence lies on the path from the edit to the use; without the barrier between them it does not.

    By the memory model of the PTX ISA, under "Causality order", a proxy fence need not be the user's own: it counts where
    it lies along the base causality path from the edit to the use, and bar.sync carries that on to other warps.
    """
    idle = "mov.u32 %r9, 0; Z: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 300; @%p2 bra Z; "  # for more than a turn
    use = idle + "sub.u32 %r0, %r0, 32; setp.eq.u32 %p1, %r0, 0; " + LOAD.replace("{size}", "128").replace("{x}", "0")
    code = (
        "setp.ge.u32 %p3, %r0, 32; @%p3 bra B; "
        + COPY
        + "bar.warp.sync -1;"
        + PUBLISH
        + "{before} B: bar.sync 0; {after}"
        "@!%p3 bra X; " + use + "X:"
    )
    launch(code.replace("{before}", ACQUIRE).replace("{after}", ""), ARRAY, threads=64, mode=mode)
    for before, after, why in (("", f"@!%p3 {ACQUIRE}", "another warp's fence"), ("", "", "edited")):
        with pytest.raises(ptxsim.SyncError, match=why):
            launch(code.replace("{before}", before).replace("{after}", after), ARRAY, threads=64, mode=mode)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("elemtype.shared::cta.b1024.b32 [%r2], 16", "element type 16"),
        ("swizzle_mode.shared::cta.b1024.b32 [%r2], 4", "swizzle_mode is unknown"),
        ("interleave_layout.shared::cta.b1024.b32 [%r2], 1", "interleaved"),
        ("box_dim.shared::cta.b1024.b32 [%r2], 0, 70000", "does not fit .box_dim"),
        ("global_stride.shared::cta.b1024.b64 [%r2], 4, 16", "dimension 4"),
    ],
)
def test_bad_values(fields: str, why: str) -> None:
    with pytest.raises(ptxsim.DescriptorError, match=why):
        launch(edit(fields), ARRAY)


def test_a_map_that_is_none() -> None:
    with pytest.raises(ptxsim.DescriptorError, match="not encoded with"):
        launch(edit("rank.shared::cta.b1024.b32 [%r2], 1", "st.shared.u32 [%r4], 7;"), ARRAY)


def test_masked_bulk_store() -> None:
    mask = 0b1010_0000_1111_0001
    array = np.full(64, 0xFFFFFFFF, "u4")
    code = f"mov.b16 %h1, {mask}; mad.lo.u32 %r5, %r0, 4, %r1; add.u32 %r6, %r0, 0x01020304; st.shared.u32 [%r5], %r6; fence.proxy.async; bar.warp.sync -1; @!%p1 bra E; cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], 128, %h1; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"
    launch(code, array)
    source = (np.arange(32, dtype="u4") + 0x01020304).view("u1")
    want = np.where(mask >> np.arange(128) % 16 & 1, source, 0xFF)
    assert array.view("u1")[:128].tolist() == want.tolist()
    assert (array[32:] == 0xFFFFFFFF).all()


def test_discard() -> None:
    array = np.arange(96, dtype="u4")
    launch("@%p1 discard.global.L2 [%rd1+128], 128;", array)
    assert array[:32].tolist() == list(range(32))
    assert array[64:].tolist() == list(range(64, 96))
    assert (array[32:64] == 0xCBCBCBCB).all()
    with pytest.raises(ptxsim.MemoryFault, match="multiple of 128"):
        launch("@%p1 discard.global.L2 [%rd1+64], 128;", array)


@pytest.mark.parametrize(
    ("place", "size", "why"),
    [
        ("%rd1", 256, ""),
        ("%rd1+16", 240, ""),
        ("%rd1+16", 256, "out of bounds"),
        ("%rd1+8", 16, "multiples of 16"),
        ("%rd1", 24, "multiples of 16"),
        ("8192", 16, "in no array"),
    ],
)
def test_bulk_prefetch(place: str, size: int, why: str) -> None:
    """It changes nothing, but its operands must be valid."""
    array = np.arange(64, dtype="u4")
    expected = pytest.raises(ptxsim.MemoryFault, match=why) if why else contextlib.nullcontext()
    with expected:
        launch(f"@%p1 cp.async.bulk.prefetch.L2.global [{place}], {size};", array)
    assert (array == np.arange(64)).all()
