# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""tcgen05.mma variants on one small tile: kinds, A in tensor memory, D of f16 and s32, scale, negation, lane masks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import ptxsim
import pytest
from ptx_single import HEADER
from test_ptxsim_wgmma import place

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
         "tf32": np.float32, "s8": np.int8, "u8": np.uint8}  # fmt: skip
CODES = {"bf16": 1, "f16": 0, "e4m3": 0, "e5m2": 1, "tf32": 2, "s8": 1, "u8": 0}
N = 32


def source(kind: str, a: str, mask: str, scale: str, ws: bool) -> str:
    """Return PTX: operands to shared memory, A also to columns 64.., 1.0 into D, one MMA, D to ``out``."""
    words = ", ".join(f"%d{i}" for i in range(N))
    loads = "".join(f"ld.global.u32 %a{i}, [%rd7+{4 * i}];" for i in range(8))
    presets = "".join(f"ld.global.u32 %d{i}, [%rd8+{4 * i}];" for i in range(N))
    stores = "".join(f"st.global.u32 [%rd6+{4 * i}], %d{i};" for i in range(N))
    copy = (
        "shl.b32 %r5, %r0, 2; {0}: cvt.u64.u32 %rd9, %r5; add.u64 %rd9, %rd9, {2}; ld.global.u32 %r7, [%rd9]; add.u32 %r8, %r2, %r5;"
        "add.u32 %r8, %r8, {1}; st.shared.u32 [%r8], %r7; add.u32 %r5, %r5, 512; setp.lt.u32 %p1, %r5, 8192; @%p1 bra {0};"
    )
    return (
        HEADER
        + f"""
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 da, .param .u64 db, .param .u32 idesc, .param .u64 out,
    .param .u64 ta, .param .u64 before)
{{
.reg .b32 %r<30>; .reg .b64 %rd<20>; .reg .pred %p<4>; .reg .b32 %d<{N}>; .reg .b32 %a<8>;
.shared .align 1024 .b8 s[16384]; .shared .align 8 .b8 bar[8]; .shared .align 4 .b8 slot[4];
mov.u32 %r0, %tid.x; mov.u32 %r2, s; ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];
{copy.format("A", 0, "%rd1")}
{copy.format("B", 8192, "%rd2")}
mov.u32 %r9, slot; mov.u32 %r10, bar; setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 128;
@%p2 mbarrier.init.shared::cta.b64 [%r10], 1;
fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync; bar.sync 0;
tcgen05.fence::after_thread_sync; ld.shared.u32 %r11, [%r9];
shr.u32 %r12, %r0, 5; shl.b32 %r12, %r12, 21; add.u32 %r12, %r12, %r11;
ld.param.u64 %rd7, [ta]; mad.wide.u32 %rd7, %r0, 32, %rd7; {loads}
ld.param.u64 %rd8, [before]; mad.wide.u32 %rd8, %r0, {4 * N}, %rd8; {presets}
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12+64], {{%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}};
tcgen05.st.sync.aligned.32x32b.x{N}.b32 [%r12], {{{words}}};
tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
shr.u32 %r3, %r2, 4; cvt.u64.u32 %rd3, %r3; ld.param.u64 %rd4, [da]; or.b64 %rd4, %rd4, %rd3;
add.u32 %r4, %r2, 8192; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd3, %r4; ld.param.u64 %rd5, [db]; or.b64 %rd5, %rd5, %rd3;
ld.param.u32 %r13, [idesc]; add.u32 %r14, %r11, 64; mov.u32 %r15, 0xFFFF0000; mov.u32 %r16, 0; mov.u32 %r17, 1; mov.u32 %r18, -1;
@!%p2 bra J;
tcgen05.mma{".ws" if ws else ""}.cta_group::1.kind::{kind} [%r11], {a}, %rd5, %r13{mask}, %p2{scale};
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10];
J: bar.warp.sync -1;
W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0; @!%p3 bra W;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{words}}}, [%r12]; tcgen05.wait::ld.sync.aligned;
ld.param.u64 %rd6, [out]; mad.wide.u32 %rd6, %r0, {4 * N}, %rd6; {stores}
tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 128;
ret;
}}
"""
    )


def run(
    kind: str, element: str, out: str = "f32", in_tmem: bool = False, mask: bool = False, scale: int = 0, negate: bool = False,
    mn: bool = False, mode: str = "late",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Run D = A B^T + before and return D's cells, the product and what was there before."""
    rng = np.random.default_rng(1)
    depth = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}[kind]
    low = 0 if element == "u8" else -4
    a, b = (rng.integers(low, 5, (rows, depth)).astype(TYPES[element]) for rows in (128, N))
    (raw_a, lbo_a, sbo_a), (raw_b, lbo_b, sbo_b) = place(a, 0, False), place(b, 64 if mn else 0, mn)
    desc_a = 1 << 46 | lbo_a // 16 << 16 | sbo_a // 16 << 32
    desc_b = 1 << 46 | lbo_b // 16 << 16 | sbo_b // 16 << 32 | (4 << 61 if mn else 0)
    code = CODES[element]
    idesc = {"f16": 0, "f32": 1, "s32": 2}[out] << 4 | code << 7 | code << 10 | N // 8 << 17 | 8 << 24
    idesc |= int(negate) << 13 | int(mn) << 16
    before = rng.integers(-3, 4, (128, N))
    cells = {"f32": before.astype("f4").view("u4"), "s32": before.astype("i4").view("u4"),
             "f16": before.astype("f2").view("u2").astype("u4")}[out]  # fmt: skip
    got = np.zeros((128, N), "u4")
    text = source(
        kind,
        "[%r14]" if in_tmem else "%rd4",
        ", {%r15, %r16, %r17, %r18}" if mask else "",
        f", {scale}" if scale else "",
        False,
    )
    words = np.ascontiguousarray(a).view("u1").reshape(128, 32).view("u4").copy()
    ptxsim.Module(text).launch("k", 1, 128, [raw_a, raw_b, desc_a, desc_b, idesc, got, words, cells], mode=mode)
    values = {"f32": lambda x: x.view("f4"), "s32": lambda x: x.view("i4"), "f16": lambda x: x.astype("u2").view("f2")}[
        out
    ](got)
    return values.astype("f8"), a.astype("f8") @ b.astype("f8").T, before.astype("f8")


@pytest.mark.parametrize("in_tmem", [False, True])
@pytest.mark.parametrize(
    ("kind", "element", "out"),
    [("f16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32"), ("f8f6f4", "e4m3", "f32"),
     ("f8f6f4", "e5m2", "f16"), ("i8", "s8", "s32"), ("i8", "u8", "s32")],
)  # fmt: skip
def test_kinds(kind: str, element: str, out: str, in_tmem: bool) -> None:
    got, product, before = run(kind, element, out, in_tmem)
    np.testing.assert_array_equal(got, product + before)


def test_negation_and_input_scale() -> None:
    got, product, before = run("f16", "bf16", scale=3, negate=True)
    np.testing.assert_array_equal(got, before / 8 - product)


def test_transposed_b_with_64_byte_swizzle() -> None:
    got, product, before = run("f16", "f16", mn=True)
    np.testing.assert_array_equal(got, product + before)


def test_disabled_output_lanes_keep_their_value() -> None:
    got, product, before = run("f16", "bf16", mask=True)
    disabled = np.zeros(128, bool)
    disabled[16:32] = True
    disabled[64] = True
    disabled[96:] = True
    np.testing.assert_array_equal(got, np.where(disabled[:, None], before, product + before))
