# ruff: noqa: E501 (lines of PTX are kept whole)
"""ldmatrix, stmatrix, movmatrix and mma.sync against the ISA's fragment tables."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import ptxsim
import pytest
from ptx_single import HEADER

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


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("depth", [8, 16])
def test_mma_sync(kind: str, depth: int) -> None:
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    rng = np.random.default_rng(0)
    a, b, c = (
        rng.integers(-4, 5, s).astype(t) for s, t in (((16, depth), dtype), ((depth, 8), dtype), ((16, 8), "f4"))
    )
    regs = np.zeros((32, 16), "u4")
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(depth // 4):
            regs[lane, i] = a[g + 8 * (i % 2), 2 * t + 8 * (i // 2) : 2 * t + 8 * (i // 2) + 2].copy().view("u4")[0]
        for i in range(depth // 8):
            regs[lane, 4 + i] = b[2 * t + 8 * i : 2 * t + 8 * i + 2, g].copy().view("u4")[0]
        for i in range(4):
            regs[lane, 8 + i] = c[g + 8 * (i // 2), 2 * t + i % 2].view("u4")
    na, nb = depth // 4, depth // 8
    out = np.zeros((32, 4), "f4")
    code = "ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 64, %rd1;" + "".join(
        f"ld.global.u32 %r{20 + i}, [%rd1+{4 * i}];" for i in range(12)
    )
    code += "".join(f"mov.b32 %f{i}, %r{28 + i};" for i in range(4))
    code += f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}}, {{{', '.join(f'%r{20 + i}' for i in range(na))}}}, {{{', '.join(f'%r{24 + i}' for i in range(nb))}}}, {{%f0, %f1, %f2, %f3}};"
    code += "ld.param.u64 %rd2, [p1]; mad.wide.u32 %rd2, %r0, 16, %rd2; st.global.v4.f32 [%rd2], {%f4, %f5, %f6, %f7};"
    launch(code, regs, out)
    want = a.astype("f4") @ b.astype("f4") + c
    for lane in range(32):
        for i in range(4):
            assert out[lane, i] == want[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
