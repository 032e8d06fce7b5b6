# ruff: noqa: E501 (lines of PTX are kept whole)
"""tcgen05.mma with block scaling against the scaled product in NumPy: kinds, scale factors, pairs, errors.

Descriptors are written from ISA tables 43 and 44; scale factors lie where ``tcgen05.cp.32x128b.warpx4`` puts a block of
128 x 4 bytes: row r in lane r % 32 (of each quarter) and column r / 32, one byte per block along K.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from simtest.runners import cell_of
from simtest.umma import TYPES, Tile, as_cells, descriptor, execute, from_cells, numbers, random_codes, tensor_a

KINDS = {
    # name: (kind, modifier, K, elements per scale factor, scale factors are ue8m0)
    "mx8": ("mxf8f6f4", ".block_scale", 32, 32, True),
    "mx8 1X": ("mxf8f6f4", ".block_scale.scale_vec::1X", 32, 32, True),
    "mx4": ("mxf4", ".block_scale.scale_vec::2X", 64, 32, True),
    "mx4 block32": ("mxf4", ".block_scale.block32", 64, 32, True),
    "nv4 2X": ("mxf4nvf4", ".block_scale.scale_vec::2X", 64, 32, True),
    "nv4 4X": ("mxf4nvf4", ".block_scale.scale_vec::4X", 64, 16, False),
    "nv4 block16": ("mxf4nvf4", ".block_scale.block16", 64, 16, True),
}


def instruction_descriptor(
    kind: str, a: str, b: str, m: int, n: int, ids: tuple[int, int], exponents: bool, more: int = 0
) -> int:
    types = 1 << 7 | 1 << 10 if kind != "mxf8f6f4" else TYPES[a].code << 7 | TYPES[b].code << 10
    return ids[1] << 4 | types | n >> 3 << 17 | int(exponents) << 23 | m >> 7 << 27 | ids[0] << 29 | more


def factors(codes: np.ndarray, exponents: bool) -> np.ndarray:
    """Return scale factors as numbers: powers of two, or unsigned e4m3."""
    if exponents:
        return 2.0 ** (codes.astype("i8") - 127)
    return codes.view(ml_dtypes.float8_e4m3fn).astype("f8")


def packed_tile(codes: np.ndarray, start: int) -> Tile:
    """Return 4-bit elements that fill their bytes, as bytes laid out K-major with 128-byte swizzling."""
    return Tile("u8", codes[:, ::2] | codes[:, 1::2] << 4, "128B", False, start)


class Case:
    """One block-scaled MMA of random operands."""

    def __init__(
        self,
        name: str,
        n: int = 64,
        group: int = 1,
        a: str = "e4m3",
        b: str = "e4m3",
        ids: tuple[int, int] = (0, 0),
        more: int = 0,
        in_tmem: bool = False,
    ) -> None:
        self.kind, self.mods, depth, block, exponents = KINDS[name]
        self.group, self.m, self.n = group, 128 * group, n
        packed = self.kind != "mxf8f6f4"
        a, b = ("e2m1", "e2m1") if packed else (a, b)
        rng = np.random.default_rng([n, group, *ids])
        a_codes, b_codes = random_codes(a, rng, self.m, depth), random_codes(b, rng, n, depth)
        low, high = (125, 130) if exponents else (0x30, 0x40)
        count = depth // block
        sfa, sfb = (rng.integers(low, high, (rows, count)).astype("u1") for rows in (self.m, n))
        scaled = [
            numbers(t, c) * np.repeat(factors(f, exponents), block, 1)
            for t, c, f in ((a, a_codes, sfa), (b, b_codes, sfb))
        ]
        self.before = rng.integers(-40, 41, (self.m, n)).astype("f8")
        self.expected = scaled[0] @ scaled[1].T + self.before
        make = (lambda t, c, s: packed_tile(c, s)) if packed else (lambda t, c, s: Tile(t, c, "128B", False, s))
        self.images = []
        self.columns = 512
        self.cells = np.zeros((group, 128, self.columns), "u4")
        self.first_a, self.first_b = n, n + 8
        for rank in range(group):
            own = slice(128 * rank, 128 * rank + 128)
            left = make(a, a_codes[own], 0)
            right = make(b, b_codes[rank * n // group : (rank + 1) * n // group], -(-left.end // 1024) * 1024)
            image = np.zeros(right.end, "u1")
            left.write(image)
            right.write(image)
            self.images.append(image)
            for codes, first, id_ in ((sfa[own], self.first_a, ids[0]), (sfb, self.first_b, ids[1])):
                for row, each in enumerate(codes):
                    word = int.from_bytes(bytes(id_) + each.tobytes() + bytes(4 - id_ - count), "little")
                    for quarter in range(4):
                        self.cells[rank, 32 * quarter + row % 32, first + row // 32] = word
        self.at = tuple(
            np.array([cell_of(r, c, self.m, n, group, False, 0) for r in range(self.m) for c in range(n)])
            .reshape(self.m, n, 3)
            .transpose(2, 0, 1)
        )
        self.cells[self.at] = as_cells(self.before, "f32")
        self.left = "[%x3]" if in_tmem else "%y0"
        if in_tmem:
            plain = ("u8", a_codes[:, ::2] | a_codes[:, 1::2] << 4) if packed else (a, a_codes)
            self.cells[:, :, n + 16 : n + 24] = tensor_a(*plain, group, False, 0)
        self.idesc = instruction_descriptor(self.kind, a, b, self.m, n, ids, exponents, more)
        self.code = (
            descriptor("%y0", left.descriptor)
            + descriptor("%y1", right.descriptor)
            + f"mov.u32 %x0, {self.idesc:#x}; add.u32 %x1, %tm, {self.first_a}; add.u32 %x2, %tm, {self.first_b}; add.u32 %x3, %tm, {n + 16};"
        )

    def run(self, mode: str = "late", code: str = "", **options: object) -> np.ndarray:
        mma = f"tcgen05.mma.cta_group::{self.group}.kind::{self.kind}{self.mods} [%tm], {self.left}, %y1, %x0, [%x1], [%x2], %yes;"
        out = execute(self.code + (code or mma), self.images, self.cells, mode, **options)
        rest = np.ones(out.shape, bool)
        rest[self.at] = False
        assert (out[rest] == self.cells[rest]).all()
        return from_cells(out[self.at], "f32")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("n", "group"), [(64, 1), (200, 1), (8, 1), (96, 2)])
def test_scaled_products(name: str, n: int, group: int) -> None:
    case = Case(name, n, group)
    np.testing.assert_array_equal(case.run(), case.expected)


@pytest.mark.parametrize(("a", "b"), [("e5m2", "e4m3"), ("e2m3", "e3m2"), ("e2m1", "e4m3")])
def test_types_mix(a: str, b: str) -> None:
    case = Case("mx8", 32, 1, a, b)
    np.testing.assert_array_equal(case.run("early"), case.expected)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("name", "a"), [("mx8", "e4m3"), ("mx8", "e3m2"), ("mx4", ""), ("nv4 4X", "")])
def test_a_in_tensor_memory(name: str, a: str, group: int) -> None:
    case = Case(name, 32, group, a, in_tmem=True)
    np.testing.assert_array_equal(case.run(), case.expected)


@pytest.mark.parametrize(("name", "ids"), [("mx8", (1, 3)), ("mx8", (2, 0)), ("mx4", (2, 0)), ("nv4 2X", (0, 2))])
def test_factors_in_other_bytes(name: str, ids: tuple[int, int]) -> None:
    case = Case(name, 40, 1, ids=ids)
    np.testing.assert_array_equal(case.run(), case.expected)


@pytest.mark.parametrize(
    ("name", "ids", "more", "why"),
    [("mx4", (1, 0), 0, "scale factor ids"), ("nv4 4X", (0, 2), 0, "scale factor ids"), ("mx8", (0, 0), 1 << 24, "reserved bit 24"),
     ("mx8", (0, 0), 1 << 2, "sparsity"), ("mx4", (0, 0), 1 << 31, "K=96"), ("mx4", (0, 0), 1 << 15, "cannot be transposed")],
)  # fmt: skip
def test_bad_descriptors(name: str, ids: tuple[int, int], more: int, why: str) -> None:
    case = Case(name, 32)
    case.code = case.code.replace(f"{case.idesc:#x}", f"{case.idesc | ids[1] << 4 | ids[0] << 29 | more:#x}")
    with pytest.raises(ptxsim.DescriptorError, match=why):
        case.run()


def test_wrong_type_of_factors() -> None:
    case = Case("mx4", 32)
    case.code = case.code.replace(f"{case.idesc:#x}", f"{case.idesc & ~(1 << 23):#x}")
    with pytest.raises(ptxsim.DescriptorError, match="bit 23 must be set"):
        case.run()


def test_places_of_factors() -> None:
    case = Case("mx8", 32)
    for bad, why in (("add.u32 %x1, %x1, 0x10000;", "lane field"), ("add.u32 %x2, %x2, 512;", "exceed")):
        case.code += bad
        with pytest.raises(ptxsim.MemoryFault, match=why):
            case.run()
        case.code = case.code.removesuffix(bad)
    with pytest.raises(ptxsim.PoisonError):
        case.run(defined=32)


def test_copied_factors() -> None:
    """tcgen05.cp brings them from shared memory to all quarters, in order with the product that follows."""
    case = Case("mx8", 32)
    mma = f"tcgen05.mma.cta_group::1.kind::{case.kind}{case.mods} [%tm], %y0, %y1, %x0, [%x1], [%x2], %yes;"
    copy = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%x1], %y5;"
    source = descriptor("%y5", 1 << 46 | 8 << 16 | 8 << 32 | 20480 >> 4)
    for image in case.images:
        image.resize(20992, refcheck=False)
        block = image[20480:20992].reshape(32, 4, 4)
        block[...] = (
            np.ascontiguousarray(case.cells[0, :32, case.first_a : case.first_a + 4]).view("u1").reshape(32, 4, 4)
        )
    case.cells[:, :, case.first_a : case.first_a + 4] = 0
    out = execute(case.code + source + copy + mma, case.images, case.cells)
    np.testing.assert_array_equal(from_cells(out[case.at], "f32"), case.expected)


def test_forms_that_do_not_exist() -> None:
    case = Case("mx8", 32)
    for mods in (".block_scale.scale_vec::2X", ".block_scale.block16"):
        with pytest.raises(ptxsim.UnknownInstruction, match="do not go together"):
            case.run(code=f"tcgen05.mma.cta_group::1.kind::mxf8f6f4{mods} [%tm], %y0, %y1, %x0, [%x1], [%x2], %yes;")
