# ruff: noqa: E501 (lines of PTX are kept whole)
"""tcgen05.cp and tcgen05.shift against formulas, and the order that the ISA gives to operations of one thread.

Sources: the ISA's shapes and warp pairs (9.7.16.2.3, 9.7.16.9), CUTLASS's Copy_Traits<SM100_UTCCP_*> (4x256b: rows 32
lanes apart; 01_23: 32 source rows to warps 0 and 1, the next 32 to warps 2 and 3), CUTLASS's cp_narrow_a_to_tmem_mma.py
(bytes 00xxxx00 and 0xxxxxx0 after decompression) and 1cta_mma_a_from_tmem.py (row r becomes row r + 1, row 31 stays).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from simtest.mma_case import Case
from simtest.umma import Tile, descriptor, execute, numbers, program, random_codes

RNG = np.random.default_rng(3)
LANES: dict[str, tuple[int, int, dict[int, list[int]]]] = {
    "128x256b": (128, 2, {r: [r] for r in range(128)}),
    "4x256b": (4, 2, {r: [32 * r] for r in range(4)}),
    "128x128b": (128, 1, {r: [r] for r in range(128)}),
    "64x128b.warpx2::02_13": (64, 1, {r: [r, r + 64] for r in range(64)}),
    "64x128b.warpx2::01_23": (64, 1, {r: [r, r + 32] if r < 32 else [r + 32, r + 64] for r in range(64)}),
    "32x128b.warpx4": (32, 1, {r: [r, r + 32, r + 64, r + 96] for r in range(32)}),
}
"""Rows, 16-byte pieces per row and the lanes that each row goes to."""


def cells(columns: int = 32, blocks: int = 1) -> np.ndarray:
    """Return random tensor memory."""
    return RNG.integers(0, 1 << 32, (blocks, 128, columns)).astype("u4")


def rows_tile(rows: int, pieces: int, mode: str, start: int = 0) -> tuple[np.ndarray, Tile]:
    """Return a random matrix of 16-byte pieces as words, and its K-major tile."""
    words = RNG.integers(0, 1 << 32, (rows, 4 * pieces)).astype("u4")
    # As bf16 rows of 8 or 16 elements; one piece has no K extent to swizzle but follows the same rows.
    return words, Tile("bf16", words.view("u2"), mode, False, start)


@pytest.mark.parametrize("mode", ["none", "32B", "128B"])
@pytest.mark.parametrize("form", LANES)
def test_copy(form: str, mode: str) -> None:
    rows, pieces, lanes = LANES[form]
    words, tile = rows_tile(max(rows, 8), pieces, mode, 1024)
    image = np.zeros(tile.end, "u1")
    tile.write(image)
    before = cells()
    want = before.copy()
    shift = 5 if form == "4x256b" else 0
    for r, targets in lanes.items():
        for lane in targets:
            want[0, lane + shift, 8 : 8 + 4 * pieces] = words[r]
    code = (
        descriptor("%y0", tile.descriptor)
        + f"add.u32 %x0, %tm, {8 + (shift << 16)}; tcgen05.cp.cta_group::1.{form} [%x0], %y0;"
    )
    for when in ("early", "late"):
        assert execute(code, [image], before, when).tolist() == want.tolist()


def test_copy_of_a_pair_reads_each_block_s_own_memory() -> None:
    tiles = [rows_tile(128, 2, "64B") for _ in range(2)]
    images = [np.zeros(t.end, "u1") for _, t in tiles]
    for image, (_, tile) in zip(images, tiles, strict=True):
        tile.write(image)
    code = descriptor("%y0", tiles[0][1].descriptor) + "tcgen05.cp.cta_group::2.128x256b [%tm], %y0;"
    out = execute(code, images, cells(32, 2))
    assert [out[b, :, :8].tolist() for b in range(2)] == [tiles[b][0].tolist() for b in range(2)]


@pytest.mark.parametrize(
    ("source", "kind", "shift"), [("b6x16_p32", "e3m2", 1), ("b6x16_p32", "e2m3", 1), ("b4x16_p64", "e2m1", 2)]
)
@pytest.mark.parametrize("form", ["128x256b", "128x128b", "32x128b.warpx4"])
def test_decompressing_copy(form: str, source: str, kind: str, shift: int) -> None:
    rows, pieces, lanes = LANES[form]
    codes = random_codes(kind, RNG, rows, 16 * pieces)
    tile = Tile(kind, codes, "128B" if pieces == 2 else "none")
    image = np.full(tile.end, 0xFF, "u1")
    image[np.unique(tile.at // 16 * 16)[:, None] + np.arange({"e2m1": 8}.get(kind, 12))] = 0
    tile.write(image)
    before = cells()
    want = before.copy()
    for r, targets in lanes.items():
        for lane in targets:
            want[0, lane, : 4 * pieces] = (codes[r] << shift).astype("u1").view("u4")
    code = descriptor("%y0", tile.descriptor) + f"tcgen05.cp.cta_group::1.{form}.b8x16.{source} [%tm], %y0;"
    assert execute(code, [image], before).tolist() == want.tolist()


@pytest.mark.parametrize(("kind", "source"), [("e3m2", "b6x16_p32"), ("e2m3", "b6x16_p32"), ("e2m1", "b4x16_p64")])
def test_decompressed_a_multiplies(kind: str, source: str) -> None:
    """The MMA reads the output of a decompressing copy: the ISA orders cp before mma."""
    case = Case(a=kind, b="e4m3", in_tmem=True)
    codes = random_codes(kind, RNG, 128, 32)
    tile = Tile(kind, codes, "32B", False, -(-len(case.images[0]) // 1024) * 1024)
    image = np.zeros(tile.end, "u1")
    image[: len(case.images[0])] = case.images[0]
    tile.write(image)
    code = (
        descriptor("%y5", tile.descriptor)
        + f"tcgen05.cp.cta_group::1.128x256b.b8x16.{source} [%x1], %y5;"
        + case.mma(", %no")
    )
    out = execute(case.code + code, [image], case.cells)
    np.testing.assert_array_equal(out[case.index()].view("f4"), numbers(kind, codes) @ case.b.T)


@pytest.mark.parametrize("quadrant", range(4))
def test_shift(quadrant: int) -> None:
    before = cells(64)
    want = before.copy()
    for r in range(31):
        want[0, 32 * quadrant + r, 16:24] = before[0, 32 * quadrant + r + 1, 16:24]
    code = f"add.u32 %x0, %tm, {(32 * quadrant << 16) + 16}; tcgen05.shift.cta_group::1.down [%x0];"
    assert execute(code, [np.zeros(0, "u1")], before).tolist() == want.tolist()


def test_shift_of_a_pair() -> None:
    before = cells(32, 2)
    want = before.copy()
    want[:, :31, :8] = before[:, 1:32, :8]
    out = execute("tcgen05.shift.cta_group::2.down [%tm];", [np.zeros(0, "u1")] * 2, before)
    assert out.tolist() == want.tolist()


def test_shift_then_copy_of_the_last_rows_then_mma() -> None:
    """The convolution's chain: shift, refresh rows 31, 63, 95, 127 by 4x256b, multiply; the ISA orders all of it."""
    case = Case(in_tmem=True)
    fresh = RNG.integers(-3, 4, (8, 16)).astype("f4")
    tile = Tile(
        "bf16", fresh.astype(ml_dtypes.bfloat16).view("u2"), "none", False, -(-len(case.images[0]) // 1024) * 1024
    )
    image = np.zeros(tile.end, "u1")
    image[: len(case.images[0])] = case.images[0]
    tile.write(image)
    code = descriptor("%y5", tile.descriptor)
    for quadrant in range(4):
        code += f"add.u32 %x5, %x1, {32 * quadrant << 16}; tcgen05.shift.cta_group::1.down [%x5];"
    code += "add.u32 %x6, %x1, 0x1F0000; tcgen05.cp.cta_group::1.4x256b [%x6], %y5;" + case.mma(", %no")
    out = execute(case.code + code, [image], case.cells)
    moved = np.concatenate([case.a[1:], case.a[:1]])
    moved[31::32] = fresh[:4]
    np.testing.assert_array_equal(out[case.index()].view("f4"), moved @ case.b.T)


CP = "tcgen05.cp.cta_group::1.128x256b [%x1], %y1;"
CP4 = "tcgen05.cp.cta_group::1.4x256b [%x1], %y1;"
SHIFT = "tcgen05.shift.cta_group::1.down [%x1];"
DONE = (
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%x9];"
    "Q: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%x9], 0; @!%p1 bra Q; tcgen05.fence::after_thread_sync;"
)


def pair_code(first: str, second: str, waited: bool) -> tuple[Case, str]:
    """Return a case and two operations on the same cells, maybe with a completed commit between them."""
    case = Case(in_tmem=True, b_mode="none")
    mma = case.mma(", %no")
    # An MMA of half the width, whose D begins at A's columns.
    other = f"mov.u32 %x7, {case.idesc & ~(63 << 17) | 2 << 17:#x};" + mma.replace(
        "[%x2], [%x1]", "[%x1], [%x3]"
    ).replace("%x0", "%x7")
    table = {"mma": mma, "other": "add.u32 %x3, %x1, 16;" + other, "cp": CP, "cp4": CP4, "shift": SHIFT}
    barrier = ".shared .align 8 .b8 own[8]; mov.u32 %x9, own; mbarrier.init.shared::cta.b64 [%x9], 1; fence.mbarrier_init.release.cluster;"
    return case, barrier + table[first] + (DONE if waited else "") + table[second]


@pytest.mark.parametrize(
    ("first", "second", "ordered"),
    [
        ("mma", "mma", True), ("cp", "mma", True), ("shift", "mma", True), ("shift", "cp4", True), ("mma", "shift", True),
        ("mma", "cp", False), ("cp", "cp", False), ("cp", "shift", False), ("shift", "cp", False), ("shift", "shift", False),
        ("mma", "other", False), ("other", "mma", False),
    ],
)  # fmt: skip
def test_order_within_a_thread(first: str, second: str, ordered: bool) -> None:
    """ISA 9.7.16.6.2 lists the pairs that execute in order; any other pair on the same cells needs a completed commit."""
    case, code = pair_code(first, second, False)
    image = np.concatenate([case.images[0], np.zeros(4096, "u1")])
    wide = np.concatenate([case.cells, case.cells], 2)
    if ordered:
        execute(case.code + code, [image], wide)
        return
    with pytest.raises(ptxsim.SyncError, match=r"not ordered|in flight"):
        execute(case.code + code, [image], wide)
    execute(case.code + pair_code(first, second, True)[1], [image], wide)


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        ("add.u32 %x0, %tm, 0x100000; tcgen05.shift.cta_group::1.down [%x0];", ptxsim.MemoryFault, "multiple of 32"),
        ("add.u32 %x0, %tm, 28; tcgen05.shift.cta_group::1.down [%x0];", ptxsim.MemoryFault, "not allocated"),
        ("add.u32 %x0, %tm, 0x10000; tcgen05.cp.cta_group::1.128x256b [%x0], %y0;", ptxsim.MemoryFault, "lane field 1"),
        ("add.u32 %x0, %tm, 0x200000; tcgen05.cp.cta_group::1.4x256b [%x0], %y0;", ptxsim.MemoryFault, "lane field 32"),
        ("tcgen05.cp.cta_group::1.64x128b [%tm], %y0;", ptxsim.UnknownInstruction, "multicast"),
        ("tcgen05.cp.cta_group::1.128x256b.warpx4 [%tm], %y0;", ptxsim.UnknownInstruction, "multicast"),
        ("tcgen05.cp.cta_group::1.128x256b.b8x16 [%tm], %y0;", ptxsim.UnknownInstruction, "b6x16_p32"),
        ("tcgen05.shift.cta_group::1 [%tm];", ptxsim.UnknownInstruction, "down"),
        ("tcgen05.shift.cta_group::2.down [%tm];", ptxsim.SyncError, "only one of them"),
        (
            "add.u64 %y0, %y0, 0x3000; tcgen05.cp.cta_group::1.128x256b [%tm], %y0;",
            ptxsim.MemoryFault,
            "leaves shared memory",
        ),
        (
            "or.b64 %y0, %y0, 0x2000000000000000; tcgen05.cp.cta_group::1.128x256b [%tm], %y0;",
            ptxsim.DescriptorError,
            "K-major",
        ),
    ],
)
def test_misuse(code: str, error: type, why: str) -> None:
    tile = rows_tile(128, 2, "none")[1]
    with pytest.raises(error, match=why):
        execute(descriptor("%y0", tile.descriptor) + code, [np.zeros(4096, "u1")], cells())


@pytest.mark.parametrize("form", ["128x256b", "128x256b.b8x16.b6x16_p32"])
def test_undefined_source(form: str) -> None:
    """Half of the source is undefined: loading those lanes is an error where a value reaches global memory."""
    tile = rows_tile(128, 2, "none")[1]
    code = descriptor("%y0", tile.descriptor) + f"tcgen05.cp.cta_group::1.{form} [%tm], %y0;"
    with pytest.raises(ptxsim.PoisonError):
        execute(code, [np.zeros(4096, "u1")], cells(), copied=2048)


def test_padding_of_packed_elements_may_be_undefined() -> None:
    """A decompressing copy ignores the padding: bytes 12..15 of each piece are never written here."""
    body = "st.shared.v2.u32 [%r6], {%r10, %r11}; st.shared.u32 [%r6+8], %r12;"
    codes = random_codes("e3m2", RNG, 128, 32)
    tile = Tile("e3m2", codes, "none")
    image = np.zeros(tile.end, "u1")
    tile.write(image)
    code = descriptor("%y0", tile.descriptor) + "tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%tm], %y0;"
    text = program(code, 32, 4096, 1, 32, 4096)
    whole = "st.shared.v4.u32 [%r6], {%r10, %r11, %r12, %r13};"
    assert whole in text
    out = np.zeros((1, 128, 32), "u4")
    ptxsim.Module(text.replace(whole, body)).launch("k", 1, 128, [image, cells(), out])
    assert out[0, :, :8].tolist() == (codes << 1).astype("u1").view("u4").tolist()


@pytest.mark.parametrize(
    "operation", ["tcgen05.shift.cta_group::1.down [%tm];", "tcgen05.cp.cta_group::1.128x256b [%tm], %y0;"]
)
def test_reading_without_waiting_is_a_race(operation: str) -> None:
    """The loads of other warps are ordered by the commit only: without waiting for it they race."""
    tile = rows_tile(128, 2, "none")[1]
    text = program(descriptor("%y0", tile.descriptor) + operation, 32, 4096, 1, 32, 4096)
    args = [np.zeros(4096, "u1"), cells(), np.zeros((1, 128, 32), "u4")]
    ptxsim.Module(text).launch("k", 1, 128, args, mode="late")
    wait = "W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%bar], 0; @!%p3 bra W;"
    assert wait in text
    with pytest.raises(ptxsim.RaceError):
        ptxsim.Module(text.replace(wait, "")).launch("k", 1, 128, args, mode="late")
    if "cp" in operation:
        with pytest.raises(ptxsim.RaceError, match="proxy fence"):
            ptxsim.Module(text.replace("fence.proxy.async.shared::cta;", "")).launch("k", 1, 128, args)
