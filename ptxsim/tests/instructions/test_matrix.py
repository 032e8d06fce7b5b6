# ruff: noqa: E501 (lines of PTX are kept whole)
"""ldmatrix, stmatrix, movmatrix and mma.sync against the ISA's fragment tables."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from simtest.golden.case import simulate
from simtest.golden.matrices import MMA, mma, small
from simtest.single import HEADER, run

REGS = ".reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<20>; .shared .align 128 .b8 s[512];"


def launch(code: str, *arrays: np.ndarray) -> None:
    """Run code on one warp; array i is the parameter p{i}."""
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    text = HEADER + f".visible .entry k({params})\n{{\n{REGS}\nmov.u32 %r0, %tid.x; mov.u32 %r1, s;\n{code}\nret;\n}}\n"
    ptxsim.Module(text).launch("k", 1, 32, list(arrays))


FILL = "ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 16, %rd1; ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1]; mad.lo.u32 %r6, %r0, 16, %r1; st.shared.v4.u32 [%r6], {%r2, %r3, %r4, %r5}; bar.warp.sync -1;"
DUMP = "ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r0, 16, %rd2; st.global.v4.u32 [%rd2], {%r10, %r11, %r12, %r13};"


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed: bool) -> None:
    data = np.arange(256, dtype="u2").reshape(4, 8, 8)
    out = np.zeros((32, 4, 2), "u2")
    trans = ".trans" if transposed else ""
    launch(
        FILL + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];" + DUMP, data, out
    )
    for lane in range(32):
        for i in range(4):
            row, col = lane // 4, 2 * (lane % 4)
            want = [data[i, col, row], data[i, col + 1, row]] if transposed else data[i, row, col : col + 2].tolist()
            assert out[lane, i].tolist() == list(want)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(transposed: bool) -> None:
    regs = np.arange(256, dtype="u2").reshape(32, 4, 2)
    out = np.zeros((4, 8, 8), "u2")
    trans = ".trans" if transposed else ""
    code = (
        "ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 16, %rd1; ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1]; mad.lo.u32 %r6, %r0, 16, %r1;"
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r6], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1; ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6];"
    )
    launch(code + DUMP, regs, out)
    for lane in range(32):
        for i in range(4):
            row, col = lane // 4, 2 * (lane % 4)
            got = [out[i, col, row], out[i, col + 1, row]] if transposed else out[i, row, col : col + 2].tolist()
            assert list(got) == regs[lane, i].tolist()


def test_movmatrix() -> None:
    regs, out = np.arange(64, dtype="u2").reshape(32, 2), np.zeros((32, 2), "u2")
    code = "ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 4, %rd1; ld.global.u32 %r2, [%rd1]; movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r0, 4, %rd2; st.global.u32 [%rd2], %r3;"
    launch(code, regs, out)
    assert (out.reshape(8, 8) == regs.reshape(8, 8).T).all()


def row_of_a(i: int, lane: int, per: int, rows: int) -> tuple[int, int]:
    """Return row and column of element i of a lane's fragment of A (``per`` elements a register)."""
    register, within = divmod(i, per)
    upper = register % 2 if rows == 16 else 0
    step = register // (rows // 8)
    return lane // 4 + 8 * upper, 4 * per * step + per * (lane % 4) + within


def row_of_b(i: int, lane: int, per: int) -> tuple[int, int]:
    """Return row and column of element i of a lane's fragment of B."""
    return 4 * per * (i // per) + per * (lane % 4) + i % per, lane // 4


def row_of_c(i: int, lane: int) -> tuple[int, int]:
    """Return row and column of element i of a lane's fragment of C and D."""
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


@pytest.mark.parametrize(("shape", "types", "na", "nb", "nc"), MMA, ids=lambda v: str(v))
def test_mma_sync(shape: str, types: str, na: int, nb: int, nc: int) -> None:
    kinds = types.split(".")
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(0)
    a, b, c = (small(rng, k, *s) for k, s in zip(kinds[1:], ((rows, depth), (depth, 8), (rows, 8)), strict=True))
    width = 8 if kinds[0] == "f64" else 4
    per = width // a.itemsize
    fragments = [np.zeros((32, n * width // m.itemsize), m.dtype) for n, m in zip((na, nb, nc), (a, b, c), strict=True)]
    for lane in range(32):
        for i in range(fragments[0].shape[1]):
            fragments[0][lane, i] = a[row_of_a(i, lane, per, rows)]
        for i in range(fragments[1].shape[1]):
            fragments[1][lane, i] = b[row_of_b(i, lane, per)]
        for i in range(fragments[2].shape[1]):
            fragments[2][lane, i] = c[row_of_c(i, lane)]
    case = next(case for case in mma(rng, MMA) if case.name == f"mma {shape} {types}")
    case.data[0][...] = np.concatenate([f.view("u1").reshape(32, -1) for f in fragments], 1)
    (out,) = simulate(case)
    got = out.view(c.dtype).reshape(32, -1)
    want = a.astype("f8") @ b.astype("f8") + c.astype("f8")
    for lane in range(32):
        for i in range(got.shape[1]):
            assert got[lane, i] == want[row_of_c(i, lane)]


def test_integer_mma_wraps_or_saturates() -> None:
    high = np.full(32, 0x7FFFFFF0, "u4")
    ones = np.full(32, 0x01010101, "u4")
    code = "mma.sync.aligned.m8n8k16.row.col{sat}.s32.s8.s8.s32 {%d, %t1}, {%a}, {%a}, {%b, %b};"
    assert run(code.replace("{sat}", ""), [ones, high], np.zeros(32, "u4"))[0] == 0x80000000
    assert run(code.replace("{sat}", ".satfinite"), [ones, high], np.zeros(32, "u4"))[0] == 0x7FFFFFFF


@pytest.mark.parametrize(("rows", "wide"), [(8, False), (16, False), (16, True)])
@pytest.mark.parametrize("kinds", [("s4", "s4"), ("u4", "s4"), ("s4", "u4"), ("b1", "and"), ("b1", "xor")], ids=str)
def test_mma_of_less_than_a_byte(kinds: tuple[str, str], wide: bool, rows: int) -> None:
    """Elements of 4 bits and single bits, by the same tables of fragments: 8 or 32 of them are a register."""
    rng, bits = np.random.default_rng(4), 1 if kinds[0] == "b1" else 4
    per = 32 // bits
    depth = 4 * per * (1 + wide)
    nb, na, nc = depth // (4 * per), depth // (4 * per) * rows // 8, rows // 4
    a, b = rng.integers(0, 1 << bits, (rows, depth)), rng.integers(0, 1 << bits, (depth, 8))
    c = rng.integers(-1000, 1000, (rows, 8))
    words = np.zeros((32, na + nb + nc), "u8")
    for lane in range(32):
        for i in range(na * per):
            words[lane, i // per] |= np.uint64(int(a[row_of_a(i, lane, per, rows)]) << bits * (i % per))
        for i in range(nb * per):
            words[lane, na + i // per] |= np.uint64(int(b[row_of_b(i, lane, per)]) << bits * (i % per))
        for i in range(nc):
            words[lane, na + nb + i] = np.uint64(int(c[row_of_c(i, lane)]) & 0xFFFFFFFF)
    types = "b1.b1" if bits == 1 else ".".join(kinds)
    tail = f".{kinds[1]}.popc" if bits == 1 else ""
    names = [f"%r{10 + k}" for k in range(na + nb + nc)]
    groups = [", ".join(names[i:j]) for i, j in ((0, na), (na, na + nb), (na + nb, na + nb + nc))]
    given, out = words.astype("u4"), np.zeros((32, nc), "i4")
    load = "".join(f"ld.global.u32 {name}, [%rd1+{4 * k}];" for k, name in enumerate(names))
    store = "".join(f"st.global.u32 [%rd2+{4 * k}], {name};" for k, name in enumerate(names[na + nb :]))
    launch(
        f"ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, {4 * len(names)}, %rd1; {load}"
        f"mma.sync.aligned.m{rows}n8k{depth}.row.col.s32.{types}.s32{tail}"
        f" {{{groups[2]}}}, {{{groups[0]}}}, {{{groups[1]}}}, {{{groups[2]}}};"
        f"ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r0, {4 * nc}, %rd2; {store}",
        given,
        out,
    )
    left, right = (np.where((m > 7) & (k == "s4"), m - 16, m) for m, k in ((a, kinds[0]), (b, kinds[1])))
    want = (a[:, :, None] ^ b[None]).sum(1) if kinds[1] == "xor" else left @ right
    for lane in range(32):
        for i in range(nc):
            assert out[lane, i] == (want + c)[row_of_c(i, lane)]


def test_poison_of_an_mma_follows_rows_and_columns() -> None:
    code = (
        "setp.eq.u32 %p1, %t0, 5; mov.b32 %t1, %a; @%p1 mov.b32 %t1, %t8; mov.b32 %t2, 0;"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%t3, %t4, %t5, %t6}, {{a}}, {{b}}, {%t2, %t2, %t2, %t2}; {keep}"
    )
    ones = np.full(32, 0x3C003C00, "u4")
    # Lane 5 holds row 1 of A's upper half: lanes 4 to 7 of the first two results are undefined.
    rows = code.replace("{{a}}", "{%t1, %a}").replace("{{b}}", "{%a}")
    keep = "shr.u32 %t7, %t0, 2; setp.eq.u32 %p2, %t7, 1; selp.b32 %d, %t5, %t3, %p2;"
    assert (run(rows.replace("{keep}", keep), [ones], np.zeros(32, "u4")) == 0x41000000).all()
    with pytest.raises(ptxsim.PoisonError, match=r"lanes \[4, 5, 6, 7\]"):
        run(rows.replace("{keep}", "mov.b32 %d, %t3;"), [ones], np.zeros(32, "u4"))
    # The same register of B is column 1: elements 1 of lanes 0, 4, 8 and so on.
    columns = code.replace("{{a}}", "{%a, %a}").replace("{{b}}", "{%t1}")
    with pytest.raises(ptxsim.PoisonError, match=r"lanes \[0, 4, 8, 12, 16, 20, 24, 28\]"):
        run(columns.replace("{keep}", "mov.b32 %d, %t4;"), [ones], np.zeros(32, "u4"))
    run(columns.replace("{keep}", "mov.b32 %d, %t3;"), [ones], np.zeros(32, "u4"))


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes(count: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (count, 16, 16)).astype("u1")
    out = np.zeros((32, 4), "u4")
    padded = np.zeros((32, 16), "u1")
    padded[: 16 * count] = data.reshape(-1, 16)
    regs = ", ".join(f"%r{10 + i}" for i in range(2 * count))
    clear = "mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;"
    code = FILL + clear + f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{regs}}}, [%r6];"
    launch(code + DUMP, padded, out)
    for lane in range(32):
        g, c = lane // 4, lane % 4
        for i in range(2 * count):
            want = data[i // 2, 4 * c : 4 * c + 4, g + 8 * (i % 2)]
            assert out[lane, i : i + 1].view("u1").tolist() == want.tolist()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_of_bytes(count: int) -> None:
    regs = np.random.default_rng(2).integers(0, 256, (32, 4, 4)).astype("u1")
    out = np.zeros((32, 16), "u1")
    source = ", ".join(f"%r{10 + i}" for i in range(count))
    code = (
        "ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 16, %rd1; ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1]; mad.lo.u32 %r6, %r0, 16, %r1;"
        f"st.shared.v4.u32 [%r6], {{0, 0, 0, 0}}; bar.warp.sync -1; stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r6], {{{source}}}; bar.warp.sync -1; ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6];"
    )
    launch(code + DUMP, regs, out)
    want = np.zeros((32, 16), "u1")
    for lane in range(32):
        g, c = lane // 4, lane % 4
        for i in range(count):
            for k in range(4):  # a lane's bytes: rows 2c and 2c+1 of column g, then of column g + 8
                want[8 * i + 2 * c + k % 2, g + 8 * (k // 2)] = regs[lane, i, k]
    assert out.tolist() == want.tolist()


def test_generic_addresses() -> None:
    data = np.arange(256, dtype="u2").reshape(4, 8, 8)
    outs = [np.zeros((32, 4, 2), "u2") for _ in range(2)]
    generic = "cvt.u64.u32 %rd3, %r6; cvta.shared.u64 %rd3, %rd3; ldmatrix.sync.aligned.m8n8.x4.b16 {%r10, %r11, %r12, %r13}, [%rd3];"
    launch(FILL + generic + DUMP, data, outs[0])
    launch(FILL + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];" + DUMP, data, outs[1])
    assert (outs[0] == outs[1]).all()
