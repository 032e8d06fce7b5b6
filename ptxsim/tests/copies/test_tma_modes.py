# ruff: noqa: E501 (lines of PTX are kept whole)
"""Tensor copies beyond plain tiles, against element-by-element formulas: swizzle atoms, packed types, conversions, reductions.

Sources: the swizzle tables of ISA 5.5.7, sub-byte types of 5.5.1.1, the tables of cp.reduce.async.bulk.tensor. Packed
types count their bytes in global memory on an mbarrier, as CUTLASS does (TmaTransactionBytes).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ptxsim
from simtest.tma import INIT, MAP, MEMORY, WAIT, load, module, store
from simtest.umma import fill, random_codes

RNG = np.random.default_rng(5)

TABLES = {
    "32B": (["01234567", "10325476"], 2),
    "64B": (["01234567", "10325476", "23016745", "32107654"], 4),
    "128B": (["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"], 8),
    "128B/32B": (["01234567", "23016745", "45670123", "67452301"], 8),
    "128B/32B/8B": (["01234567", "23016745", "45670123", "67452301"], 8),
    "128B/64B": (["01234567", "45670123"], 8),
}
"""ISA 5.5.7: what each of the eight 16-byte pieces of a 128-byte line holds, line by line; and pieces per row."""


@pytest.mark.parametrize("start", [0, 384])
@pytest.mark.parametrize("mode", TABLES)
def test_swizzle_tables(mode: str, start: int) -> None:
    table, pieces = TABLES[mode]
    rows = 16 * 8 // pieces
    array = RNG.integers(0, 65536, (rows, 8 * pieces)).astype("u2")
    tmap = ptxsim.encode_tiled(
        "uint16", MEMORY.map(array), [8 * pieces, rows], [16 * pieces], [8 * pieces, rows], swizzle=mode
    )
    instruction = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0}], [%r2]"
    )
    got = load(instruction, tmap, 2048, 2048, start=start).view("u8").reshape(-1, 2)
    linear = array.reshape(-1).view("u8").reshape(-1, 2)
    want = np.zeros_like(linear)
    for place in range(len(linear)):
        line = (8 * start // 128 + place) // 8
        source = place // 8 * 8 + int(table[line % len(table)][place % 8])
        want[place] = linear[source][:: -1 if mode.endswith("8B") and line % 2 and mode.count("/") == 2 else 1]
    assert got.tolist() == want.tolist()
    out = np.zeros_like(array)
    back = ptxsim.encode_tiled(
        "uint16", MEMORY.map(out), [8 * pieces, rows], [16 * pieces], [8 * pieces, rows], swizzle=mode
    )
    store(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 0}], [%r1]",
        back,
        got.reshape(-1).view("u1"),
        start,
    )
    assert out.tolist() == array.tolist()


def test_traversal_strides() -> None:
    array = RNG.integers(0, 65536, (9, 12, 8)).astype("u2")
    tmap = ptxsim.encode_tiled("uint16", MEMORY.map(array), [8, 12, 9], [16, 192], [8, 7, 4], element_strides=[5, 3, 2])
    instruction = (
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 4, -2}], [%r2]"
    )
    got = load(instruction, tmap, 2 * 8 * 3 * 2, 2 * 8 * 3 * 2).view("u2").reshape(2, 3, 8)
    for z, y in itertools.product(range(2), range(3)):
        row, plane = 4 + 3 * y, -2 + 2 * z
        want = array[plane, row] if 0 <= plane < 9 and row < 12 else np.zeros(8, "u2")
        assert got[z, y].tolist() == want.tolist()


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return elements packed without gaps, row by row, the first in the lowest bits."""
    rows = np.zeros((len(codes), codes.shape[1] * bits // 8), "u1")
    place = np.arange(codes.shape[1]) * bits
    for row, line in zip(rows, codes, strict=True):
        for bit in range(bits):
            np.bitwise_or.at(row, (place + bit) // 8, (line >> bit & 1) << ((place + bit) % 8).astype("u1"))
    return rows


@pytest.mark.parametrize("mode", ["none", "128B", "128B/32B"])
@pytest.mark.parametrize(("dtype", "kind", "bits"), [("16u4_align16b", "e2m1", 4), ("16u6_align16b", "e3m2", 6)])
def test_padded_types(dtype: str, kind: str, bits: int, mode: str) -> None:
    """Sixteen elements go to the start of sixteen bytes; an mbarrier counts the bytes of global memory."""
    codes = random_codes(kind, RNG, 7, 256)
    array = packed(codes, bits)
    tmap = ptxsim.encode_tiled(dtype, MEMORY.map(array), [256, 7], [array.shape[1]], [128, 8], swizzle=mode)
    instruction = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {128, 1}], [%r2]"
    )
    used = bits * 2
    reads = "".join(f"ld.shared.u32 %r11, [%r10+{i}]; st.global.u32 [%rd8+{i}], %r11;" for i in range(0, used, 4))
    code = (
        INIT + MAP + f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {8 * 128 * bits // 8}; {instruction};" + WAIT
        + "ld.param.u64 %rd9, [out]; mov.u32 %r9, 0; D: add.u32 %r10, %r1, %r9; cvt.u64.u32 %rd8, %r9; add.u64 %rd8, %rd8, %rd9;"
        + reads + "add.u32 %r9, %r9, 16; setp.lt.u32 %p2, %r9, 1024; @%p2 bra D;"
    )  # fmt: skip
    out = np.zeros(1024, "u1")
    module(code).launch("k", 1, 1, [tmap, out], mode="late")
    want = np.zeros(1024, "u1")
    r, c = np.arange(6)[:, None], np.arange(128)[None, :]
    linear = r * 128 + c
    at = linear ^ {"none": 0, "128B": (r % 8) << 4, "128B/32B": (r % 4) << 5}[mode]
    fill(want, at, codes[1:, 128:], bits)
    assert out.tolist() == want.tolist()
    # The padding itself is undefined.
    with pytest.raises(ptxsim.PoisonError):
        module(code.replace(f"[%r10+{used - 4}]", "[%r10+12]")).launch("k", 1, 1, [tmap, out])


def test_unpadded_4_bit_type() -> None:
    codes = random_codes("e2m1", RNG, 5, 64)
    array = packed(codes, 4)
    tmap = ptxsim.encode_tiled("16u4_align8b", MEMORY.map(array), [64, 5], [32], [32, 4])
    instruction = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {16, 3}], [%r2]"
    )
    got = load(instruction, tmap, 64, 64).reshape(4, 16)
    assert got[:2].tolist() == array[3:, 8:24].tolist()
    assert not got[2:].any()


def test_store_of_6_bit_elements() -> None:
    """b6p2x16: the two upper bits of each byte are dropped."""
    out = np.zeros((4, 96), "u1")
    tmap = ptxsim.encode_tiled("16u6_align16b", MEMORY.map(out), [128, 4], [96], [128, 4], swizzle="128B/64B")
    tile = RNG.integers(0, 256, (4, 128)).astype("u1")
    lines = tile.reshape(4, 2, 64).copy()
    lines[1::2] = lines[1::2, ::-1]  # 64-byte halves exchanged in odd lines
    store("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 0}], [%r1]", tmap, lines.reshape(-1))
    assert out.tolist() == packed(tile & 63, 6).tolist()


GOOD_PACKED = {"dtype": "16u6_align16b", "address": 1 << 44, "dims": [256, 4], "strides": [192], "box": [128, 4]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dims": [192, 4]}, "multiple of 128"),
        ({"box": [64, 4]}, "must be 128"),
        ({"strides": [208]}, "multiples of 32"),
        ({"address": (1 << 44) + 16}, "multiple of 32"),
        ({"swizzle": "64B"}, "exceeds|not possible"),
        ({"swizzle": "128B/32B/8B"}, "not possible"),
        ({"dtype": "16u4_align16b", "swizzle": "128B/64B"}, "not possible"),
        ({"dtype": "16u4_align8b", "dims": [255, 4]}, "even"),
        ({"oob_fill": 1}, "floating-point"),
        ({"dims": [256, 4, 1], "strides": [192, 768], "box": [128, 4, 1], "interleave": 1}, "cannot be interleaved"),
    ],
)
def test_packed_encoder_refuses(change: dict, why: str) -> None:
    assert len(ptxsim.encode_tiled(**GOOD_PACKED)) == 128
    with pytest.raises(ptxsim.TensorMapError, match=why):
        ptxsim.encode_tiled(**(GOOD_PACKED | change))


@pytest.mark.parametrize(
    ("dtype", "instruction", "why"),
    [
        ("16u6_align16b", "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {64, 0}], [%r2]", "multiple of 128"),
        ("16u4_align16b", "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 0}], [%r1]", "cannot be stored"),
        ("16u6_align16b", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {0, 0}], [%r1]", "not possible"),
    ],
)  # fmt: skip
def test_packed_misuse(dtype: str, instruction: str, why: str) -> None:
    array = np.zeros((4, 192), "u1")
    tmap = ptxsim.encode_tiled(**(GOOD_PACKED | {"dtype": dtype, "address": MEMORY.map(array), "strides": [192]}))
    with pytest.raises(ptxsim.DescriptorError, match=why):
        module(INIT + MAP + instruction + ";").launch("k", 1, 1, [tmap, np.zeros(4, "u1")])


def test_interleaved_maps() -> None:
    """The driver's own rules first; what it takes is refused as not modelled."""
    good = {
        "dtype": "uint16",
        "address": 1 << 44,
        "dims": [16, 9, 9],
        "strides": [32, 288],
        "box": [8, 4, 1],
        "interleave": 1,
    }
    with pytest.raises(ptxsim.DescriptorError, match="interleaved layouts are not modelled"):
        ptxsim.encode_tiled(**good)
    for change, why in (
        ({"dims": [16, 9], "strides": [32], "box": [8, 4]}, "3 or more"),
        ({"interleave": 2}, "32-byte swizzle"),
        ({"interleave": 2, "strides": [32, 272], "swizzle": 1}, "multiples of 32"),
        ({"interleave": 2, "address": (1 << 44) + 16, "swizzle": 1}, "multiple of 32"),
        ({"interleave": 3}, "unknown"),
    ):
        with pytest.raises(ptxsim.TensorMapError, match=why):
            ptxsim.encode_tiled(**(good | change))


@pytest.mark.parametrize("dtype", ["float32", "float32_ftz", "tfloat32", "tfloat32_ftz"])
def test_conversions_of_float32_loads(dtype: str) -> None:
    """Tf32 types round to nearest even at ten fraction bits (ISA 5.5.1); FTZ types keep subnormals, as on an H200."""
    bits = np.array([0x3F800000, 0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0xBF801000, 0x00000001, 0x807FFFFF, 0x00400000, 0x7F7FFFFF,
                     0x7F800000, 0xFF800000, 0x00800000, 0x00801000, 0x80803000, 0x47FFF001], "u4")  # fmt: skip
    array = bits.view("f4").copy()
    tmap = ptxsim.encode_tiled(dtype, MEMORY.map(array), [16], [], [16])
    got = load(
        "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0}], [%r2]",
        tmap,
        64,
        64,
    ).view("u4")

    def expected(b: int) -> int:
        if "tfloat32" in dtype and b >> 23 & 255 != 255:
            low, b = b & 0x1FFF, b & ~0x1FFF
            b += 0x2000 if low > 0x1000 or (low == 0x1000 and b & 0x2000) else 0
        return b

    assert got.tolist() == [expected(int(b)) for b in bits]


def test_float32_addition_flushes_subnormals() -> None:
    """ISA of cp.reduce.async.bulk: .add.f32 flushes subnormal inputs and results to zero with their sign."""
    old = np.array([1e-40, 0.0, -1e-40, 1.5e-38, 1.0, -0.0, 3.0, -2.0], "f4")
    new = np.array([1.0, 1e-40, -0.0, -1.4e-38, -1e-40, -1e-41, 4.0, 2.0], "f4")
    array = old.copy()
    tmap = ptxsim.encode_tiled("float32", MEMORY.map(array), [8], [], [8])
    store(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd1, {0}], [%r1]", tmap, new.view("u1")
    )
    assert array.view("u4").tolist() == np.array([1, 0, -0.0, 0, 1, -0.0, 7, 0], "f4").view("u4").tolist()


ALLOWED = {
    "add": ["uint32", "int32", "uint64", "float32", "float16", "bfloat16"],
    "min": ["uint32", "int32", "uint64", "int64", "float16", "bfloat16"],
    "max": ["uint32", "int32", "uint64", "int64", "float16", "bfloat16"],
    "inc": ["uint32"], "dec": ["uint32"],
    "and": ["uint32", "int32", "uint64", "int64"], "or": ["uint32", "int32", "uint64", "int64"], "xor": ["uint32", "int32", "uint64", "int64"],
}  # fmt: skip
"""ISA table of cp.reduce.async.bulk.tensor (.b32 and .b64 are the integer types of a map)."""
NUMPY = {
    "uint32": "u4",
    "int32": "i4",
    "uint64": "u8",
    "int64": "i8",
    "float32": "f4",
    "float16": "f2",
    "uint8": "u1",
    "uint16": "u2",
}
FORMULAS = {
    "add": lambda a, b, m: a + b, "min": lambda a, b, m: min(a, b), "max": lambda a, b, m: max(a, b), "and": lambda a, b, m: a & b,
    "or": lambda a, b, m: a | b, "xor": lambda a, b, m: a ^ b, "inc": lambda a, b, m: 0 if a >= b else a + 1,
    "dec": lambda a, b, m: b if a == 0 or a > b else a - 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("reduction", "dtype"), [(r, d) for r, kinds in ALLOWED.items() for d in kinds if d != "bfloat16"]
)
def test_reductions(reduction: str, dtype: str) -> None:
    kind = np.dtype(NUMPY[dtype])
    if kind.kind == "f":
        old, new = (RNG.integers(-9, 9, 32).astype(kind) for _ in range(2))
    else:
        info = np.iinfo(kind)
        old, new = (RNG.integers(info.min, info.max, 32, kind) for _ in range(2))
        old[:6], new[:6] = [0, 1, 2, 3, 4, 5], [2, 1, 1, 9, 0, 5]
    array = old.copy()
    tmap = ptxsim.encode_tiled(dtype, MEMORY.map(array), [32], [], [32])
    store(
        f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{reduction}.tile.bulk_group [%rd1, {{0}}], [%r1]",
        tmap,
        new.view("u1"),
    )
    mask = (1 << 8 * kind.itemsize) - 1
    values = [FORMULAS[reduction](a.item(), b.item(), mask) for a, b in zip(old, new, strict=True)]
    if kind.kind == "f":
        assert array.tolist() == values
    else:
        assert array.view(f"u{kind.itemsize}").tolist() == [v & mask for v in values]


@pytest.mark.parametrize(
    ("reduction", "dtype"),
    [("add", "int64"), ("min", "float32"), ("inc", "int32"), ("and", "float32"), ("add", "uint8"), ("xor", "uint16")],
)
def test_reductions_that_do_not_exist(reduction: str, dtype: str) -> None:
    array = np.zeros(32, NUMPY[dtype])
    tmap = ptxsim.encode_tiled(dtype, MEMORY.map(array), [32], [], [32])
    with pytest.raises(ptxsim.DescriptorError, match=f"{reduction} is not possible"):
        store(
            f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{reduction}.tile.bulk_group [%rd1, {{0}}], [%r1]",
            tmap,
            np.zeros(256, "u1"),
        )


def test_modes_may_stand_before_the_state_spaces() -> None:
    array = RNG.integers(0, 65536, (8, 64)).astype("u2")
    tmap = ptxsim.encode_tiled("uint16", MEMORY.map(array), [64, 8], [128], [64, 1])
    instruction = "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 5, 2, 2, 7}], [%r2]"
    assert load(instruction, tmap, 512, 512).view("u2").reshape(4, 64).tolist() == array[[5, 2, 2, 7]].tolist()
