"""mma.sp against products of the matrix that values and metadata stand for, and metadata that means nothing."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from simtest.single import HEADER

TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
         "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8, "f32": np.float32, "s32": np.int32}  # fmt: skip
FORMS = [
    (16, "f16", "f16", "f16"), (16, "f16", "f16", "f32"), (32, "f16", "f16", "f16"), (32, "f16", "f16", "f32"),
    (16, "bf16", "bf16", "f32"), (32, "bf16", "bf16", "f32"), (8, "tf32", "tf32", "f32"), (16, "tf32", "tf32", "f32"),
    (64, "e4m3", "e5m2", "f32"), (64, "e5m2", "e5m2", "f16"), (32, "s8", "u8", "s32"), (64, "u8", "s8", "s32"),
    (64, "s4", "u4", "s32"), (128, "u4", "s4", "s32"),
]  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s4": 4, "u4": 4}


def numbers(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Return small integers of a type; 4-bit ones as bytes."""
    if kind in ("s4", "u4"):
        return rng.integers(0, 16, shape)
    return rng.integers(0 if kind == "u8" else -3, 4, shape).astype(TYPES[kind])


def value(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Return what elements stand for."""
    wide = matrix.astype("f8")
    return np.where(wide > 7, wide - 16, wide) if kind == "s4" else wide


def words(parts: np.ndarray, kind: str) -> np.ndarray:
    """Return elements [lane, element] as 32-bit registers."""
    if kind not in ("s4", "u4"):
        return np.ascontiguousarray(parts).view("u4")
    return np.array([[sum(int(x) << 4 * i for i, x in enumerate(r)) for r in lane.reshape(-1, 8)] for lane in parts])


class Sparse:
    """Operands of one mma.sp, as matrices and as registers."""

    def __init__(self, depth: int, a: str, b: str, out: str, selector: int = 0, ordered: bool = True) -> None:
        rng = np.random.default_rng([depth, selector])
        self.depth, self.kinds, self.out, self.selector, self.ordered = depth, (a, b), out, selector, ordered
        bits = BITS.get(a, 8)
        self.bits, self.per, self.chunk = bits, 32 // bits, {32: 2, 16: 4, 8: 4, 4: 8}[bits]
        pairs = [(i, j) for i in range(4) for j in range(4) if i < j or (i > j and not ordered)]
        if bits == 32:
            pairs = [(0, 1), (2, 3)]
        self.chosen = np.array(pairs)[rng.integers(0, len(pairs), (16, depth // self.chunk))]
        self.values, self.b = numbers(rng, a, 16, depth // 2), numbers(rng, b, depth, 8)
        self.c = numbers(rng, "u8", 16, 8).astype(TYPES[out])

    def matrix(self) -> np.ndarray:
        """Return A in full."""
        full = np.zeros((16, self.depth))
        unit = {32: 1, 16: 1, 8: 1, 4: 2}[self.bits]
        for row in range(16):
            for chunk, (low, high) in enumerate(self.chosen[row]):
                for i, index in enumerate([low // 2] if self.bits == 32 else [low, high]):
                    for p in range(unit):
                        at = (chunk * (1 if self.bits == 32 else 2) + i) * unit + p
                        full[row, chunk * self.chunk + index * unit + p] = value(self.values[row, at], self.kinds[0])
        return full

    def metadata(self) -> np.ndarray:
        """Return the metadata of the lanes; those that contribute none have rubbish."""
        found = np.full(32, 0xDEAD0000, "u8")
        chunks = self.depth // self.chunk
        for row in range(16):
            g, high = row % 8, row // 8
            for chunk in range(chunks):
                low, top = self.chosen[row, chunk]
                code = int(low) | int(top) << 2
                if self.bits > 8:  # four chunks of two rows a lane
                    lane = 4 * g + chunk // 4 + self.selector * (chunks // 4)
                    shift = 16 * high + 4 * (chunk % 4)
                else:  # eight chunks of one row
                    lane = 4 * g + 2 * (chunk // 8) + high + self.selector * (chunks // 4)
                    shift = 4 * (chunk % 8)
                found[lane] = (int(found[lane]) & ~(15 << shift)) | code << shift
        return found.astype("u4")

    def registers(self) -> np.ndarray:
        """Return the registers of A, B and C and the metadata, [lane, register]."""
        lanes = np.arange(32)
        g, c = lanes // 4, lanes % 4
        halves = self.depth // 2 // (4 * self.per)
        a = [
            self.values[g + 8 * (i % 2), 4 * self.per * (i // 2) + self.per * c + e]
            for i in range(2 * halves)
            for e in range(self.per)
        ]
        b = [self.b[4 * self.per * i + self.per * c + e, g] for i in range(2 * halves) for e in range(self.per)]
        acc = [self.c[g + 8 * (j // 2), 2 * c + j % 2] for j in range(4)]
        parts = [words(np.stack(a, 1), self.kinds[0]), words(np.stack(b, 1), self.kinds[1])]
        parts += [np.ascontiguousarray(np.stack(acc, 1)).view("u4"), self.metadata()[:, None]]
        self.counts = [x.shape[1] for x in parts]
        return np.concatenate(parts, 1).astype("u4")

    def text(self, clear: str = "") -> str:
        """Return the kernel; ``clear`` is code ahead of the mma."""
        na, nb, nc, _ = self.counts
        names = [f"%r{i}" for i in range(sum(self.counts))]
        lists = ["{" + ", ".join(x) + "}" for x in (names[:na], names[na : na + nb], names[na + nb : -1])]
        head = "mma.sp::ordered_metadata" if self.ordered else "mma.sp"
        types = f"{self.out}.{self.kinds[0]}.{self.kinds[1]}.{self.out}"
        loads = "".join(f"ld.global.b32 {x}, [%d0+{4 * i}];" for i, x in enumerate(names))
        stores = "".join(f"st.global.b32 [%d1+{4 * i}], {x};" for i, x in enumerate(names[na + nb : -1]))
        return (
            HEADER + ".visible .entry k(.param .u64 a, .param .u64 out)\n{\n.reg .b32 %r<30>; .reg .b32 %t, %u;"
            " .reg .b64 %d<2>; .reg .pred %q; mov.u32 %t, %tid.x; ld.param.u64 %d0, [a]; ld.param.u64 %d1, [out];"
            f"mad.wide.u32 %d0, %t, {4 * len(names)}, %d0; mad.wide.u32 %d1, %t, {4 * nc}, %d1;\n{loads}\n{clear}\n"
            f"{head}.sync.aligned.m16n8k{self.depth}.row.col.{types} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]},"
            f" {names[-1]}, {self.selector};\n{stores} ret;\n}}\n"
        )

    def run(self, given: np.ndarray | None = None, clear: str = "", **options: object) -> np.ndarray:
        """Run it and return D."""
        given = self.registers() if given is None else given
        out = np.zeros((32, self.counts[2]), "u4")
        ptxsim.Module(self.text(clear), **options).launch("k", 1, 32, [given, out])
        found = np.zeros((16, 8))
        elements = out.view(TYPES[self.out])
        for lane in range(32):
            for j in range(4):
                found[lane // 4 + 8 * (j // 2), 2 * (lane % 4) + j % 2] = elements[lane, j]
        return found

    def want(self) -> np.ndarray:
        """Return the product."""
        return self.matrix() @ value(self.b, self.kinds[1]) + self.c.astype("f8")


@pytest.mark.parametrize(("depth", "a", "b", "out"), FORMS, ids=str)
def test_products(depth: int, a: str, b: str, out: str) -> None:
    chunks = depth // {32: 2, 16: 4, 8: 4, 4: 8}[BITS.get(a, 8)]
    for selector in range(4 // (chunks // 4)):
        case = Sparse(depth, a, b, out, selector)
        np.testing.assert_array_equal(case.run(), case.want())
    if BITS.get(a, 8) < 32:  # indices may fall without .ordered_metadata
        case = Sparse(depth, a, b, out, ordered=False)
        np.testing.assert_array_equal(case.run(), case.want())


@pytest.mark.parametrize(("depth", "kind"), [(32, "f16"), (16, "tf32"), (64, "s8"), (128, "u4")])
def test_metadata_in_the_order_of_cutlass(depth: int, kind: str) -> None:
    """CUTLASS's reorder_meta puts metadata so that ldmatrix gives each lane what the instruction takes."""
    wide = BITS.get(kind, 8) > 8  # elements of 16 bits of metadata, two tiles of 16 rows; else of 32 bits
    cases = [Sparse(depth, kind, kind, "f32", selector) for selector in range(1 + wide)]
    chosen = np.concatenate([case.chosen for case in cases])
    nibbles = chosen[..., 0] | chosen[..., 1] << 2
    per = 4 if wide else 8
    given = (nibbles.reshape(len(nibbles), -1, per) << 4 * np.arange(per)).sum(2)  # [row, element]
    group, interweave = (32, 4) if wide else (16, 2)
    placed = np.zeros(given.size, "u2" if wide else "u4")
    for row in range(len(given)):
        for column in range(2):
            to, at = row // group * group + row % 8 * interweave + row % group // 8, column
            if to % 2 != at % 2:
                to, at = to + at - to % 2, to % 2
            placed[2 * to + at] = given[row, column]
    lanes = placed.view("u4")
    for selector, case in enumerate(cases):
        mine = np.arange(32) % 4 // 2 == selector if wide else np.ones(32, bool)
        assert (case.metadata()[mine] == lanes[mine]).all()


def test_columns_that_metadata_leaves_out_do_not_matter() -> None:
    case = Sparse(32, "f16", "f16", "f32")
    case.chosen[:] = (0, 1)
    want = case.want()
    case.b[2::4] = np.inf
    case.b[3::4] = np.nan
    np.testing.assert_array_equal(case.run(), want)


@pytest.mark.parametrize(
    ("depth", "kind", "ordered", "pair", "says"),
    [
        (32, "f16", True, (1, 1), r"0b0101 of row 9, columns 20 to 23: of .sp::ordered_metadata"),
        (32, "f16", True, (2, 1), r"0b0110 of row 9, columns 20 to 23: of .sp::ordered_metadata"),
        (32, "f16", False, (3, 3), r"0b1111 of row 9, columns 20 to 23: its two indices differ \(1 of 128 chunks"),
        (64, "s8", False, (0, 0), "0b0000 of row 9, columns 20 to 23: its two indices differ"),
        (128, "s4", True, (0, 0), "0b0000 of row 9, columns 40 to 47: of .sp::ordered_metadata"),
        (16, "tf32", False, (1, 2), "0b1001 of row 9, columns 10 to 11: of tf32 it is 0b0100 or 0b1110"),
    ],
)
def test_metadata_that_means_nothing(depth: int, kind: str, ordered: bool, pair: tuple[int, int], says: str) -> None:
    case = Sparse(depth, kind, kind, "s32" if kind in ("s8", "s4") else "f32", ordered=ordered)
    case.chosen[9, 5] = pair
    with pytest.raises(ptxsim.DescriptorError, match=says) as error:
        case.run()
    assert error.value.finding.rule == "sparse-metadata"
    with pytest.warns(ptxsim.StrictWarning, match="sparse-metadata|metadata"):
        case.run(allow="sparse-metadata")


def test_undefined_operands() -> None:
    case = Sparse(32, "f16", "f16", "f32")
    given = case.registers()
    last = sum(case.counts) - 1
    undefined = "{ .reg .b32 %v; setp.ne.u32 %q, %t, LANE; @%q mov.b32 %v, REG; mov.b32 REG, %v; }"
    metadata = undefined.replace("REG", f"%r{last}")
    with pytest.raises(ptxsim.PoisonError, match="the metadata of a sparse mma"):
        case.run(given, metadata.replace("LANE", "5"))
    case.run(given, metadata.replace("LANE", "6"))  # a lane whose metadata does not count
    row = undefined.replace("REG", "%r0").replace("LANE", "5")
    with pytest.raises(ptxsim.PoisonError, match=r"lanes \[4, 5, 6, 7\]"):
        case.run(given, row)
    case.chosen[:] = (0, 1)  # lane 5's registers of B have rows 2 and 3, 10 and 11, and so on of column 1
    case.run(case.registers(), undefined.replace("REG", "%r4").replace("LANE", "5"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r", 0;", ", 2;", "the sparsity selector is a constant below 2"),
        (r", 0;", ", %t;", "the sparsity selector is a constant below 2"),
        ("m16n8k32", "m16n8k64", "shape m16n8k64 of .f16"),
        ("f32.f16.f16.f32", "f32.f16.bf16.f32", "this combination of types"),
        ("row.col", "row.col.satfinite", "this combination of types"),
    ],
)
def test_forms_that_do_not_exist(old: str, new: str, says: str) -> None:
    case = Sparse(32, "f16", "f16", "f32")
    case.registers()
    with pytest.raises(ptxsim.UnknownInstruction, match=re.escape(says)):
        ptxsim.Module(case.text().replace(old, new, 1) if old in case.text() else "").launch("k", 1, 32, [])
