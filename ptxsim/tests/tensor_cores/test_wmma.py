# ruff: noqa: E501 (lines of PTX are kept whole)
"""wmma.load, wmma.mma and wmma.store against matrix products, their fragments against ptxas's code, and their misuse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from ptxsim.tensor_cores.wmma import places, registers
from simtest import nvrtc
from simtest.single import HEADER

LARGE = ("m16n16k16", "m32n8k16", "m8n32k16")
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "f32": 4, "s32": 4, "f64": 8}
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8, "f32": np.float32,
         "s32": np.int32, "f64": np.float64}  # fmt: skip
FORMS = [
    *((shape, "f16", d, c) for shape in LARGE for d in ("f16", "f32") for c in ("f16", "f32")),
    *((shape, kind, "f32", "f32") for shape in LARGE for kind in ("bf16",)), ("m16n16k8", "tf32", "f32", "f32"),
    *((shape, kind, "s32", "s32") for shape in LARGE for kind in ("s8", "u8")), ("m8n8k4", "f64", "f64", "f64"),
]  # fmt: skip


def sizes(shape: str) -> list[int]:
    """Return M, N and K."""
    return [int(v) for v in shape[1:].replace("n", " ").replace("k", " ").split()]


def names(letter: str, count: int) -> str:
    """Return a fragment of registers."""
    return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"


def small(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Return small integers in a type."""
    return rng.integers(0 if kind == "u8" else -4, 5, shape).astype(TYPES[kind])


def stored(matrix: np.ndarray, layout: str, stride: int) -> np.ndarray:
    """Return a matrix as it lies in memory, rows (or columns) at a stride."""
    lines = matrix if layout == "row" else matrix.T
    out = np.zeros((len(lines), stride), matrix.dtype)
    out[:, : lines.shape[1]] = lines
    return out


def kernel(code: str, kind: str = "f16") -> str:
    """Return PTX of a kernel with four arrays; registers a, b, c, d are fragments, ``s`` is shared memory."""
    width = "b64" if kind == "f64" else "b32"
    regs = "".join(f".reg .{width} %{x}<9>;" for x in "abcd")
    loads = "".join(f"ld.param.u64 %p{x}, [p{x}];" for x in "abcd")
    params = ", ".join(f".param .u64 p{x}" for x in "abcd")
    return (
        HEADER
        + f".visible .entry k({params})\n{{\n{regs}.reg .b64 %pa, %pb, %pc, %pd; .reg .b32 %t, %n; .reg .pred %q; .shared .align 128 .b8 s[4096];\n"
        f"{loads} mov.u32 %t, %tid.x;\n{code}\nret;\n}}\n"
    )


def product(shape: str, kind: str, out: str, old: str, layouts: str, strides: tuple = ("", "", "", ""), space: str = ".global") -> str:  # fmt: skip
    """Return load, load, load, mma and store: ``layouts`` has a letter each for A, B, C and D."""
    of = ["row" if x == "r" else "col" for x in layouts]
    kinds = (kind, kind, old, out)
    frag = [names(x, registers(r, shape, k)) for x, r, k in zip("abcd", "abcc", kinds, strict=True)]
    loads = "".join(
        f"wmma.load.{x}.sync.aligned.{of[i]}.{shape}{space}.{kinds[i]} {frag[i]}, [%p{x}]{strides[i]};\n"
        for i, x in enumerate("abc")
    )
    types = f"{out}.{old}" if kind == "f16" else f"{out}.{kind}.{kind}.{old}"
    return (
        loads + f"wmma.mma.sync.aligned.{of[0]}.{of[1]}.{shape}.{types} {frag[3]}, {frag[0]}, {frag[1]}, {frag[2]};\n"
        f"wmma.store.d.sync.aligned.{of[3]}.{shape}{space}.{out} [%pd], {frag[3]}{strides[3]};\n"
    )


def arrays(shape: str, kind: str, out: str, old: str, layouts: str, pad: int = 0) -> tuple[list, np.ndarray, list[str]]:
    """Return operands as they lie in memory, the product, and the strides' text."""
    rng, (m, n, k) = np.random.default_rng(7), sizes(shape)
    a, b, c = small(rng, kind, m, k), small(rng, kind, k, n), small(rng, old, m, n)
    found, strides = [], []
    for matrix, x in zip((a, b, c, np.zeros((m, n), TYPES[out])), layouts, strict=True):
        extent = matrix.shape[1] if x == "r" else matrix.shape[0]
        found.append(stored(matrix, "row" if x == "r" else "col", extent + pad))
        strides.append(f", {extent + pad}" if pad else "")
    return found, a.astype("f8") @ b.astype("f8") + c.astype("f8"), strides


@pytest.mark.parametrize(("shape", "kind", "out", "old"), FORMS, ids=str)
def test_products(shape: str, kind: str, out: str, old: str) -> None:
    for layouts, pad in (("rcrr", 0), ("crcr", 16), ("rrrc", 16), ("cccc", 0)):
        given, want, strides = arrays(shape, kind, out, old, layouts, pad)
        code = product(shape, kind, out, old, layouts, tuple(strides), ".global" if pad else "")
        ptxsim.Module(kernel(code, kind)).launch("k", 1, 32, given)
        got = given[3] if layouts[3] == "r" else given[3].T
        np.testing.assert_array_equal(got[: want.shape[0], : want.shape[1]], want.astype(TYPES[out]))


def packed(bits_of: np.ndarray, bits: int) -> np.ndarray:
    """Return rows of small numbers as bytes, the first in the low bits."""
    rows = bits_of.reshape(len(bits_of), -1, 8 // bits)
    return (rows << bits * np.arange(8 // bits)).sum(2).astype("u1")


@pytest.mark.parametrize("kind", ["s4", "u4", "xor", "and"])
def test_products_of_less_than_a_byte(kind: str) -> None:
    rng, bits = np.random.default_rng(3), 4 if kind[1:] == "4" else 1
    depth = 128 // bits
    a, b = (rng.integers(0, 1 << bits, (8, depth)) for _ in range(2))
    c = rng.integers(-99, 99, (8, 8)).astype("i4")
    shape, name = f"m8n8k{depth}", kind if bits == 4 else "b1"
    given = [packed(a, bits), packed(b, bits), c, np.zeros((8, 8), "i4")]
    head = "wmma.mma" if bits == 4 else f"wmma.mma.{kind}.popc"
    code = product(shape, name, "s32", "s32", "rcrr").replace("wmma.mma", head)
    ptxsim.Module(kernel(code)).launch("k", 1, 32, given)
    left, right = (np.where((m > 7) & (kind == "s4"), m - 16, m) for m in (a, b))
    want = (a[:, None] ^ b[None]).sum(2) if kind == "xor" else left @ right.T
    np.testing.assert_array_equal(given[3], want + c)


def test_sums_that_do_not_fit() -> None:
    given, _, _ = arrays("m16n16k16", "s8", "s32", "s32", "rcrr")
    given[2][:] = 2**31 - 3
    given[0][:], given[1][:] = 1, 1
    code = product("m16n16k16", "s8", "s32", "s32", "rcrr")
    ptxsim.Module(kernel(code)).launch("k", 1, 32, given)
    assert (given[3] == -(2**31) + 13).all()
    ptxsim.Module(kernel(code.replace("s8.s8.s32", "s8.s8.s32.satfinite"))).launch("k", 1, 32, given)
    assert (given[3] == 2**31 - 1).all()


def at(role: str, shape: str, kind: str, lane: int) -> list[list[tuple[int, int]]]:
    """Return row and column of the elements of a lane's registers."""
    rows, columns = places(role, shape, kind)[:, :, lane].tolist()
    return [list(zip(*each, strict=True)) for each in zip(rows, columns, strict=True)]


def test_fragments_are_those_of_ptxas() -> None:
    """Elements that ptxas 13.0 for sm_90 loads into each register of lane 5, (g, c) = (1, 1)."""
    assert at("a", "m16n16k16", "f16", 5) == [[(r, k), (r, k + 1)] for k in (2, 10) for r in (1, 9)]
    assert at("b", "m16n16k16", "f16", 5) == [[(k, n), (k + 1, n)] for n in (1, 9) for k in (2, 10)]
    assert at("c", "m16n16k16", "f16", 5) == [[(r, n), (r, n + 1)] for n in (2, 10) for r in (1, 9)]
    assert at("c", "m16n16k16", "f32", 5) == [[(r, n + i)] for n in (2, 10) for r in (1, 9) for i in (0, 1)]
    assert at("a", "m32n8k16", "f16", 5) == [
        [(t + r, k), (t + r, k + 1)] for t in (0, 16) for k in (2, 10) for r in (1, 9)
    ]
    assert at("c", "m32n8k16", "f32", 5) == [[(r, 2 + i)] for r in (1, 9, 17, 25) for i in (0, 1)]
    assert at("b", "m8n32k16", "bf16", 5) == [
        [(k, t + n), (k + 1, t + n)] for t in (0, 16) for k in (2, 10) for n in (1, 9)
    ]
    assert at("a", "m8n32k16", "bf16", 5) == [[(1, k), (1, k + 1)] for k in (2, 10)]
    assert at("c", "m8n32k16", "s32", 5) == [[(2 + i, n)] for n in (1, 9, 17, 25) for i in (0, 1)]
    assert at("c", "m8n32k16", "f16", 5) == [[(2, n), (3, n)] for n in (1, 9, 17, 25)]
    assert at("a", "m16n16k16", "s8", 5) == [[(r, 4 + i) for i in range(4)] for r in (1, 9)]
    assert at("b", "m16n16k16", "s8", 5) == [[(4 + i, n) for i in range(4)] for n in (1, 9)]
    assert at("b", "m8n32k16", "s8", 5) == [[(4 + i, n) for i in range(4)] for n in (1, 9, 17, 25)]
    assert at("a", "m16n16k8", "tf32", 5) == [[(r, k)] for k in (1, 5) for r in (1, 9)]
    assert at("b", "m16n16k8", "tf32", 5) == [[(k, n)] for n in (1, 9) for k in (1, 5)]
    assert at("c", "m8n8k4", "f64", 5) == [[(1, 2)], [(1, 3)]]
    assert at("a", "m8n8k32", "s4", 5) == [[(1, 8 + i) for i in range(8)]]


def test_fragments_changed_in_place() -> None:
    """A program may scale a fragment's elements, with its copies, and add to a result again."""
    given, _, _ = arrays("m16n16k16", "f16", "f32", "f32", "rcrr")
    *loads, multiply, store, _ = product("m16n16k16", "f16", "f32", "f32", "rcrr").split("\n")
    scale = "mov.b32 %n, 0x40004000;" + "".join(f"mul.rn.f16x2 %a{i}, %a{i}, %n;" for i in range(8))
    again = multiply.replace("%c", "%d")
    ptxsim.Module(kernel("\n".join([*loads, scale, multiply, again, store]))).launch("k", 1, 32, given)
    a, b, c = given[0].astype("f8"), given[1].astype("f8").T, given[2].astype("f8")
    np.testing.assert_array_equal(given[3], 4 * a @ b + c)


PLAIN = product("m16n16k16", "f16", "f32", "f32", "rcrr", (", %n",) * 4)


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        ("mov.u32 %n, 16", "mov.u32 %n, 24", ptxsim.MemoryFault, "4 bytes at byte 528 of array 1 "),
        ("mov.u32 %n, 16", "mov.u32 %n, 12", ptxsim.MemoryFault, "stride 12: a row must start at a multiple of 16 bytes"),
        ("[%pd], {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, %n", "[%pd], {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, 8", ptxsim.MemoryFault,
         "stride 8: rows of 16 elements overlap"),
        ("[%pa], %n", "[%pa+16], %n", ptxsim.MemoryFault, "is misaligned for 32 bytes"),
        ("[%pa], %n", "[%pa+32], %n", ptxsim.MemoryFault, "4 bytes at byte 512 of array 1 "),
        ("mov.u32 %n, 16", "mov.u32 %n, %t", ptxsim.SyncError, "one address and one stride"),
        ("mma.sync.aligned.row", "mma.sync.aligned.col", ptxsim.SyncError,
         r"a fragment of A \(m16n16k16, f16, row\) is used as one of A \(m16n16k16, f16, col\)"),
        ("mma.sync.aligned.row.col.m16n16k16", "mma.sync.aligned.row.col.m32n8k16", ptxsim.SyncError, r"\(m32n8k16, f16, row\)"),
        ("{%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, {%b0", "{%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, {%b0", ptxsim.SyncError,
         "a fragment of B .* is used as one of A"),
        ("store.d.sync.aligned.row.m16n16k16", "store.d.sync.aligned.row.m32n8k16", ptxsim.SyncError, "a fragment of the accumulator"),
        ("wmma.load.b", "// wmma.load.b", ptxsim.PoisonError, "a global store"),
        ("wmma.mma", "setp.lt.u32 %q, %t, 31; @%q wmma.mma", ptxsim.DeadlockError, "missing lanes"),
        ("m16n16k16.f32.f32", "m16n16k16.f32.f32.satfinite", ptxsim.UnknownInstruction, "no such combination"),
        ("load.a.sync.aligned.row.m16n16k16.global.f16", "load.a.sync.aligned.row.m16n16k8.global.f16", ptxsim.UnknownInstruction,
         "there is no shape m16n16k8 of .f16"),
        ("%a6, %a7}, [", "%a6}, [", ptxsim.UnknownInstruction, "a fragment of this form has 8 registers, not 7"),
    ],
)  # fmt: skip
def test_misuse(old: str, new: str, kind: type, says: str) -> None:
    given, _, _ = arrays("m16n16k16", "f16", "f32", "f32", "rcrr")
    code = "mov.u32 %n, 16;\n" + PLAIN
    assert old in code
    with pytest.raises(kind, match=says):
        ptxsim.Module(kernel(code.replace(old, new, 1))).launch("k", 1, 32, given)


def test_a_fragment_of_another_layout_can_be_allowed() -> None:
    given, want, _ = arrays("m16n16k16", "f16", "f32", "f32", "rcrr")
    code = kernel("mov.u32 %n, 16;\n" + PLAIN.replace("mma.sync.aligned.row", "mma.sync.aligned.col"))
    with pytest.warns(ptxsim.StrictWarning, match="a fragment of A"):
        ptxsim.Module(code, allow="wmma-fragment").launch("k", 1, 32, given)
    np.testing.assert_array_equal(given[3], want)


SHARED = """
shr.u32 %n, %t, 5; setp.eq.u32 %q, %n, 0; mov.u32 %n, s;
@!%q bra W;
{fill}
W: {barrier}
@%q bra E;
wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {a}, [%n], 16;
wmma.load.b.sync.aligned.col.m16n16k16.global.f16 {b}, [%pb], 16;
wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {c}, [%pc], 16;
wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {d}, {a}, {b}, {c};
wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%pd], {d}, 16;
E:
"""
FILL = "wmma.load.c.sync.aligned.row.m16n16k16.global.f16 {%c0, %c1, %c2, %c3}, [%pa]; wmma.store.d.sync.aligned.row.m16n16k16.shared.f16 [%n], {%c0, %c1, %c2, %c3};"  # fmt: skip


def shared(**parts: str) -> str:
    """Return two warps: the first writes A to shared memory, the second multiplies."""
    text = SHARED
    for name, part in {"fill": FILL, "barrier": "bar.sync 0;", **{x: names(x, 8) for x in "abcd"}, **parts}.items():
        text = text.replace("{" + name + "}", part)
    return kernel(text)


def test_shared_memory_and_its_races() -> None:
    given, want, _ = arrays("m16n16k16", "f16", "f32", "f32", "rcrr")
    ptxsim.Module(shared()).launch("k", 1, 64, given)
    np.testing.assert_array_equal(given[3], want)
    for mode in ("early", "late"):
        with pytest.raises(ptxsim.RaceError, match=r"wmma\.(load\.a|store\.d)"):
            ptxsim.Module(shared(barrier="")).launch("k", 1, 64, given, mode=mode)
    with pytest.raises(ptxsim.PoisonError):
        ptxsim.Module(shared(fill="")).launch("k", 1, 64, given)
    with pytest.raises(ptxsim.MemoryFault, match="shared"):
        ptxsim.Module(shared().replace("[%n], 16", "[%n], 256")).launch("k", 1, 64, given)


def test_races_in_global_memory() -> None:
    """The first warp stores what the second loads."""
    given, _, _ = arrays("m16n16k16", "f16", "f32", "f32", "rcrr")
    code = shared(fill=FILL.replace("shared.f16 [%n]", "global.f16 [%pb]"), barrier="")
    with pytest.raises(ptxsim.RaceError, match=r"wmma\.(load\.b|store\.d)"):
        ptxsim.Module(code.replace("shared.f16 {%a0", "global.f16 {%a0").replace("[%n], 16", "[%pa], 16")).launch(
            "k", 1, 64, given, race_global=True
        )


def compiled(defines: tuple[str, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel of wmma.cu; return what it computes and what it should."""
    rng = np.random.default_rng(1)
    a, b = small(rng, "f16", 16, 64), small(rng, "f16", 32, 64)
    out = np.zeros((16, 32), "f4")
    ptx = nvrtc.kernel_ptx("wmma.cu", defines=defines)
    ptxsim.Module(ptx).launch("wmma", 1, 64, [a, b, out, 64, np.float32(0.5)])
    return out, 0.5 * a.astype("f8") @ b.T.astype("f8")


def test_a_compiled_kernel() -> None:
    np.testing.assert_array_equal(*compiled())
    with pytest.raises(ptxsim.RaceError, match=r"wmma\.load\.a"):
        compiled(("NO_BARRIER",))
    with pytest.raises(ptxsim.PoisonError):  # the padding of rows is read
        compiled(("STRIDE=16",))
