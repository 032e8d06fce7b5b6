# ruff: noqa: E501 (lines of PTX are kept whole)
"""Forms of tcgen05.mma: scale, negation, masks, hints, .ashift; errors; undefined operands."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.mma_case import Case
from simtest.umma import Tile, as_cells, descriptor, execute, from_cells


def test_negation_and_input_scale() -> None:
    case = Case()
    for bits, sign in ((1 << 13, -1), (1 << 14, -1), (3 << 13, 1)):
        got = case.run(f"mov.u32 %x5, {case.idesc | bits:#x};" + case.mma(", %yes, 3", idesc="%x5"))
        np.testing.assert_array_equal(got, case.before / 8 + sign * case.product)
    got = Case(a="tf32").run(Case(a="tf32").mma(", %yes, 15"))
    np.testing.assert_array_equal(got, Case(a="tf32").product + Case(a="tf32").before * 2.0**-15)


@pytest.mark.parametrize("kind", ["e4m3", "s8"])
def test_input_scale_is_for_two_kinds_only(kind: str) -> None:
    case = Case(a=kind, out="s32" if kind == "s8" else "f32")
    with pytest.raises(ptxsim.UnknownInstruction, match="scale-input-d"):
        case.run(case.mma(", %yes, 3"))


def test_overwriting_ignores_d() -> None:
    case = Case()
    np.testing.assert_array_equal(case.run(case.mma(", %no")), case.product)


def test_integers_wrap_or_saturate() -> None:
    case = Case(a="u8", out="s32")
    top = np.full_like(case.before, 2**31 - 1)
    case.cells[case.index()] = as_cells(top, "s32")
    wrapped = (case.product + top).astype("i8").astype("i4")
    np.testing.assert_array_equal(case.run(), wrapped)
    got = case.run(f"mov.u32 %x5, {case.idesc | 1 << 3:#x};" + case.mma(idesc="%x5"))
    np.testing.assert_array_equal(got, top)


@pytest.mark.parametrize("group", [1, 2])
def test_disabled_output_lanes_keep_their_value(group: int) -> None:
    case = Case(m=128 * group, group=group)
    rng = np.random.default_rng(7)
    words = rng.integers(0, 1 << 32, 4 * group)
    setup = "".join(f"mov.u32 %x{10 + i}, {int(w)};" for i, w in enumerate(words))
    names = ", ".join(f"%x{10 + i}" for i in range(4 * group))
    got = case.run(setup + case.mma(f", {{{names}}}, %yes"))
    # Bit i of the vector is lane i; rows 0-127 of the pair are the even block's lanes (layouts D and A).
    disabled = np.array([words[r // 32] >> (r % 32) & 1 for r in range(case.m)], bool)
    np.testing.assert_array_equal(got, np.where(disabled[:, None], case.before, case.product + case.before))


@pytest.mark.parametrize(
    ("shape", "parts"),
    [({"m": 64, "n": 128, "ws": True}, 2), ({"m": 32, "n": 64, "ws": True}, 4), ({"m": 128, "n": 64, "group": 2}, 2)],
)
def test_each_part_of_the_data_path_reads_its_own_a(shape: dict, parts: int) -> None:
    """A in tensor memory lies in every part's lanes; different copies give a product each (FlashMLA's dual GEMM)."""
    case = Case(**shape, in_tmem=True)
    rows, width = shape["m"] // case.group, case.n // parts
    want = case.before.copy()
    for part in range(parts):
        lanes = slice(128 // parts * part, 128 // parts * part + rows)
        cells = case.cells[:, lanes, case.width : case.width + 8]
        cells[...] = np.roll(cells, part, axis=1)
        a = np.concatenate([np.roll(block, part, axis=0) for block in np.split(case.a, case.group)])
        some = slice(part * width, (part + 1) * width)
        want[:, some] += a @ case.b[some].T
    np.testing.assert_array_equal(case.run(), want)


def zero_mask(m: int, n: int, sc: list[int], fs: list[int], skip: int, use: int) -> tuple[int, np.ndarray]:
    """Return a zero-column mask descriptor (ISA table 45) and, element by element, the mask its examples describe."""
    bits = 1 << 39 | skip << 40 | use << 48
    mask = []
    for part in range(128 // m):
        bits |= sc[part] << 8 * part | fs[part] << 32 + part
        ones, zeros = [True] * (skip + 1), [False] * (use + 1)
        period = ones + zeros if fs[part] else zeros + ones
        run = period * (2 * n)
        mask += run[sc[part] : sc[part] + n * m // 128]
    return bits, np.array(mask)


@pytest.mark.parametrize(("m", "n"), [(128, 64), (64, 128), (32, 128)])
def test_zero_column_masks(m: int, n: int) -> None:
    bits, mask = zero_mask(m, n, [1, 0, 3, 2], [1, 0, 0, 1], 2, 3)
    case = Case(m=m, n=n, ws=True, zero=mask)
    got = case.run(f"mov.u64 %y5, {bits:#x};" + case.mma(", %yes, %y5"))
    np.testing.assert_array_equal(got, case.product + case.before)


def test_zeroed_columns_may_be_undefined() -> None:
    """B's rows 64..127 never reach shared memory; the mask replaces just those by zeros."""
    bits, mask = zero_mask(128, 128, [0], [0], 63, 63)
    case = Case(n=128, ws=True, zero=mask, a_mode="none", b_mode="none")
    code = f"mov.u64 %y5, {bits:#x};" + case.mma(", %yes, %y5")
    copied = len(case.images[0]) - 2048
    got = execute(case.code + code, case.images, case.cells, copied=copied)[case.index()]
    np.testing.assert_array_equal(from_cells(got, "f32"), case.product + case.before)
    with pytest.raises(ptxsim.PoisonError):
        execute(case.code + case.mma(), case.images, case.cells, copied=copied)


@pytest.mark.parametrize(
    "hint", ["collector::a::fill", "collector::a::use", "collector::a::lastuse", "collector::a::discard"]
)
def test_collector_hints_change_nothing(hint: str) -> None:
    case = Case()
    np.testing.assert_array_equal(case.run(case.mma(mods="." + hint)), case.product + case.before)
    case = Case(m=64, n=64, ws=True)
    hint = hint.replace("::a::", "::b2::")
    np.testing.assert_array_equal(case.run(case.mma(mods="." + hint)), case.product + case.before)


@pytest.mark.parametrize("mods", [".ashift.collector::a::fill", ".collector::b0::fill", ".collector::a::keep"])
def test_bad_collector_hints(mods: str) -> None:
    case = Case(in_tmem=True)
    with pytest.raises(ptxsim.UnknownInstruction, match="collector"):
        case.run(case.mma(mods=mods))


@pytest.mark.parametrize("group", [1, 2])
def test_ashift_moves_a_down_afterwards(group: int) -> None:
    """After the MMA, A's row r becomes row r + 1, but row 31 of every 32 stays.

    Source: CUTLASS's 1cta_mma_a_from_tmem.py, whose reference was observed on a B200 (the ISA says only "down by one row,
    except for the last row").
    """
    case = Case(m=128 * group, group=group, in_tmem=True)
    moved = case.a.copy()
    for r in range(case.m):
        if r % 32 != 31:
            moved[r] = case.a[r + 1]
    code = case.mma(mods=".ashift") + case.mma()
    before = case.cells[:, :, case.width : case.width + 8].copy()
    out = execute(case.code + code, case.images, case.cells)
    got = from_cells(out[case.index()], "f32")
    np.testing.assert_array_equal(got, case.before + case.product + moved @ case.b.T)
    lanes = np.arange(128)
    source = np.where(lanes % 32 == 31, lanes, lanes + 1)
    np.testing.assert_array_equal(out[:, :, case.width : case.width + 8], before[:, source])


def test_ashift_needs_m_128_or_256() -> None:
    case = Case(m=64, in_tmem=True)
    with pytest.raises(ptxsim.DescriptorError, match="ashift"):
        case.run(case.mma(mods=".ashift"))


@pytest.mark.parametrize("name", ["e2m1", "e3m2"])
def test_containers_with_padding_bits_are_reported(name: str) -> None:
    case = Case(a=name, in_tmem=True)
    case.cells[0, 5, case.width] |= 1
    with pytest.raises(ptxsim.DescriptorError, match="padding bits"):
        case.run()


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%x2], %y0, %y1, [%x3], %x0, %yes;", "mma.sp is not modelled"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16.ashift [%x2], [%x1], %y1, %x0, %yes;", "ashift"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%x2], %y0, %y1, %x0, {%x5, %x6}, %yes;", "disable-output-lane"),
    ],
)  # fmt: skip
def test_unsupported_forms_are_named(instruction: str, why: str) -> None:
    with pytest.raises(ptxsim.UnknownInstruction, match=why):
        Case().run(instruction)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ("add.u32 %x2, %x2, 0x100000;", ptxsim.MemoryFault, "lane field 16 is not legal for layout D"),
        ("add.u32 %x2, %x2, 400;", ptxsim.MemoryFault, "not allocated"),
        ("add.u64 %y0, %y0, 0x800;", ptxsim.MemoryFault, "leave the block"),
        ("add.u64 %y1, %y1, 0x4000;", ptxsim.DescriptorError, "bits 14-15"),
        ("or.b64 %y1, %y1, 0x10000000000000;", ptxsim.DescriptorError, "bit 52"),
        ("or.b64 %y1, %y1, 0x2000000000000000;", ptxsim.DescriptorError, "swizzle mode 3"),
        ("or.b32 %x0, %x0, 0x40;", ptxsim.DescriptorError, "reserved bit 6"),
    ],
)
def test_bad_operands(change: str, error: type, why: str) -> None:
    case = Case()
    with pytest.raises(error, match=why):
        case.run(change + case.mma())


def test_a_and_d_of_layout_f_share_their_lane_half() -> None:
    case = Case(m=64, in_tmem=True)
    with pytest.raises(ptxsim.MemoryFault, match="same lane half"):
        case.run("add.u32 %x2, %tm, 0x100000;" + case.mma())


def test_undefined_rows_of_a_make_rows_of_d_undefined() -> None:
    """The second half of A's rows never reaches shared memory."""
    case = Case(a_mode="none", b_mode="none", n=64)
    a, b = case.images[0][:4096], case.images[0][4096:]
    case.images = [np.concatenate([b, a])]
    lo, hi = (
        Tile("bf16", np.zeros((rows, 16), "u2"), "none", False, start).descriptor
        for rows, start in ((64, 0), (128, 2048))
    )
    case.code += descriptor("%y1", lo) + descriptor("%y0", hi)
    np.testing.assert_array_equal(case.run(), case.product + case.before)
    with pytest.raises(ptxsim.PoisonError):
        execute(case.code + case.mma(), case.images, case.cells, copied=4096)
    masked = "mov.u32 %x5, 0; mov.u32 %x6, -1;" + case.mma(", {%x5, %x5, %x6, %x6}, %yes")
    out = from_cells(execute(case.code + masked, case.images, case.cells, copied=4096)[case.index()], "f32")
    np.testing.assert_array_equal(out[:64], (case.product + case.before)[:64])
    np.testing.assert_array_equal(out[64:], case.before[64:])


def test_undefined_accumulator() -> None:
    case = Case()
    cells = case.cells[:, :, :32].copy()
    with pytest.raises(ptxsim.PoisonError):
        execute(case.code + case.mma(), case.images, cells, defined=0)
    out = execute(case.code + case.mma(", %no"), case.images, cells, defined=0)
    np.testing.assert_array_equal(from_cells(out[case.index()], "f32"), case.product)


def test_undefined_a_in_tensor_memory() -> None:
    case = Case(in_tmem=True)
    with pytest.raises(ptxsim.PoisonError):
        execute(case.code + case.mma(", %no"), case.images, case.cells, defined=32)


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("random", 3)])
def test_chain_in_other_modes(mode: str, seed: int) -> None:
    case = Case(m=64, n=64, half=16)
    got = case.run(case.mma(", %no") + case.mma() + case.mma(), mode)
    np.testing.assert_array_equal(got, 3 * case.product)


@pytest.mark.parametrize(
    "options", [{}, {"in_tmem": True}, {"m": 256, "group": 2}, {"m": 64, "n": 64, "ws": True}], ids=str
)
def test_without_race_detection(options: dict) -> None:
    case = Case(**options)
    out = execute(case.code + case.mma(), case.images, case.cells, check=False)
    np.testing.assert_array_equal(from_cells(out[case.index()], "f32"), case.product + case.before)
