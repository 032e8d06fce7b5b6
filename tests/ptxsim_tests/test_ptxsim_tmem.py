# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Tensor-memory shapes and descriptors against the ISA's tables and CUTLASS's copy layouts."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from ptx_single import HEADER
from ptxsim.tcgen05 import data_path, decode_instruction_descriptor, decode_smem_descriptor
from ptxsim.tmem import fragment


def cute(shape: tuple, stride: tuple, index: int) -> int:
    """Evaluate a CuTe layout (colexicographic) at a linear index."""
    total = 0
    for s, d in zip(shape, stride, strict=False):
        total += index % s * d
        index //= s
    return total


# CUTLASS copy_traits_sm100: (thread shape, thread stride, value shape, value stride, columns of the block), in bits of
# the block read row by row. Source: Copy_Traits<SM100_TMEM_LOAD_*1x>::DstLayout.
TRAITS = {
    "32x32b": ((32,), (32,), (32,), (1,), 32),
    "16x64b": ((2, 2, 8), (512, 32, 64), (32,), (1,), 64),
    "16x128b": ((4, 8), (32, 128), (32, 2), (1, 1024), 128),
    "16x256b": ((4, 8), (64, 256), (64, 2), (1, 2048), 256),
    "16x32bx2": ((16, 2), (64, 32), (32,), (1,), 64),
}


@pytest.mark.parametrize("shape", TRAITS)
def test_fragments_match_cutlass(shape: str) -> None:
    thread_shape, thread_stride, value_shape, value_stride, row_bits = TRAITS[shape]
    lanes, columns = fragment(shape, 1, 1, False)
    for register in range(lanes.shape[0]):
        for thread in range(32):
            bit = cute(thread_shape, thread_stride, thread) + cute(value_shape, value_stride, 32 * register)
            assert (lanes[register, thread, 0], columns[register, thread, 0]) == (bit // row_bits, bit % row_bits // 32)


@pytest.mark.parametrize(("shape", "step"), [("32x32b", 1), ("16x64b", 2), ("16x128b", 4), ("16x256b", 8)])
def test_repetitions_move_along_the_columns(shape: str, step: int) -> None:
    one, many = fragment(shape, 1, 0, False), fragment(shape, 4, 0, False)
    per = one[0].shape[0]
    for repetition in range(4):
        part = slice(per * repetition, per * (repetition + 1))
        assert (many[0][part] == one[0]).all()
        assert (many[1][part] == one[1] + step * repetition).all()


def test_data_paths_cover_every_element_once() -> None:
    for m, n, group, ws, letter, lanes in (
        (128, 64, 1, False, "D", 128), (64, 64, 1, False, "F", 64), (32, 64, 1, True, "G", 128), (64, 128, 1, True, "E", 128),
        (128, 64, 1, True, "D", 128), (256, 64, 2, False, "A", 128), (128, 64, 2, False, "B", 128),
    ):  # fmt: skip
        name, parts, lane, column = data_path(m, n, group, ws)
        cells = {(int(lane[r, p]), int(c)) for r in range(m // group) for p in range(parts) for c in column}
        assert name == letter
        assert len(cells) == m // group * n
        assert len({cell[0] for cell in cells}) == lanes


# Values of sm100 kernels' descriptors, made by hand from ISA table 42.
@pytest.mark.parametrize(
    ("bits", "m", "n", "a_mn", "b_mn"),
    [(0x4080490, 64, 32, 0, 0), (0x4100490, 64, 64, 0, 0), (0x8088490, 128, 32, 1, 0), (0x8118490, 128, 64, 1, 1)],
)
def test_instruction_descriptor_values(bits: int, m: int, n: int, a_mn: int, b_mn: int) -> None:
    desc = decode_instruction_descriptor(bits, "f16", 1, False)
    assert (desc.m, desc.n, desc.a_mn, desc.b_mn) == (m, n, bool(a_mn), bool(b_mn))
    assert (desc.a_kind, desc.b_kind, desc.out) == ("bf16", "bf16", "f32")


GOOD = 0x4100490


@pytest.mark.parametrize(
    ("bits", "kind", "group", "ws"),
    [
        *((GOOD | 1 << bit, "f16", 1, False) for bit in (0, 2, 3, 6, 23, 29, 30)),
        (GOOD | 2 << 4, "f16", 1, False),
        (GOOD | 7 << 7, "f16", 1, False),
        (GOOD & ~(31 << 24) | 2 << 24, "f16", 1, False),
        (GOOD & ~(63 << 17), "f16", 1, False),
        (GOOD, "f16", 2, False),
        (GOOD & ~(63 << 17) | 4 << 17, "f16", 1, True),
        (GOOD, "f16", 2, True),
        (GOOD | 3 << 7, "f8f6f4", 1, False),
        (GOOD & ~(7 << 4), "tf32", 1, False),
    ],
)
def test_bad_instruction_descriptors(bits: int, kind: str, group: int, ws: bool) -> None:
    with pytest.raises(ptxsim.DescriptorError):
        decode_instruction_descriptor(bits, kind, group, ws)


def test_shared_memory_descriptor() -> None:
    base = 1 << 46 | 2 << 61 | 64 << 32 | 1 << 16 | 0x123
    layout = decode_smem_descriptor(base)
    assert (layout.start, layout.lbo, layout.sbo, layout.span) == (0x1230, 16, 1024, 128)
    for bad in (base ^ 1 << 46, base | 1 << 47, base | 1 << 49, base | 1 << 52, base | 1 << 53, base | 1 << 60, base | 1 << 14,
                base | 1 << 30, base | 1 << 61, base & ~(7 << 61) | 1 << 61, base & ~(7 << 61) | 5 << 61):  # fmt: skip
        with pytest.raises(ptxsim.DescriptorError):
            decode_smem_descriptor(bad)
    for mode, span in ((0, 0), (2, 128), (4, 64), (6, 32)):
        assert decode_smem_descriptor(base & ~(7 << 61) | mode << 61).span == span


ALLOC = (
    "mov.u32 %r1, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {n}; bar.sync 0;"
    "ld.shared.u32 %r2, [%r1];"
)
FREE = "bar.sync 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, {n}; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


def body(code: str, n: int = 64, free: bool = True, params: str = "") -> ptxsim.Module:
    """Return a one-warp kernel that allocates, runs code, frees."""
    regs = ".reg .b32 %r<200>; .reg .b64 %rd<9>; .reg .pred %p<4>; .shared .align 16 .b8 slot[16];"
    text = ALLOC.replace("{n}", str(n)) + code + (FREE.replace("{n}", str(n)) if free else "")
    return ptxsim.Module(HEADER + f".visible .entry k({params})\n{{\n{regs}\n{text}\nret;\n}}\n")


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("late", 0), ("random", 5)])
@pytest.mark.parametrize(
    ("shape", "count", "packed"),
    [("32x32b", 4, ""), ("16x64b", 2, ""), ("16x128b", 2, ""), ("16x256b", 1, ""), ("32x32b", 2, "16b")],
)
def test_store_then_load(shape: str, count: int, packed: str, mode: str, seed: int) -> None:
    """Store per-thread values through a shape; read whole lanes back with 32x32b, and check each cell's place."""
    n = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape] * count
    regs = ", ".join(f"%r{20 + i}" for i in range(n))
    set_values = "mov.u32 %r3, %tid.x;" + "".join(f"mad.lo.u32 %r{20 + i}, %r3, 256, {i + 1};" for i in range(n))
    zero = ", ".join(["%r9"] * 16)
    suffix = f".unpack::{packed}" if packed else ""
    read = ", ".join(f"%r{100 + i}" for i in range(16))
    code = (
        "mov.u32 %r9, 0;"
        + set_values
        + f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r2], {{{zero}}}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.st.sync.aligned.{shape}.x{count}{suffix}.b32 [%r2], {{{regs}}}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{read}}}, [%r2]; tcgen05.wait::ld.sync.aligned;"
        "ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r3, 64, %rd1;"
        + "".join(f"st.global.u32 [%rd1+{4 * i}], %r{100 + i};" for i in range(16))
    )
    out = np.zeros((32, 16), "u4")
    body(code, params=".param .u64 out").launch("k", 1, 32, [out], mode=mode, seed=seed)
    want = np.zeros((32, 16), "u4")
    for t in range(32):
        for i in range(n):
            value = t * 256 + i + 1
            if packed:
                want[t, 2 * i], want[t, 2 * i + 1] = value & 0xFFFF, value >> 16
            elif shape == "32x32b":
                want[t, i] = value
            elif shape == "16x64b":
                want[t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * i] = value
            elif shape == "16x128b":
                want[t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)] = value
            else:
                want[t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)] = value
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("code", "n", "free", "why"),
    [
        ("", 48, True, "power of two"),
        ("", 64, False, "without freeing"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;", 64, False, "not the start of an allocation"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+4], 32;", 64, False, "after relinquish"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2+0x200000];", 64, True, "quadrant"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2+64];", 64, True, "not allocated"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2]; tcgen05.wait::ld.sync.aligned; setp.eq.u32 %p1, %r3, 0; @%p1 bra X; X:",
         64, True, "undefined"),
        ("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", 64, True, "only one of them"),
    ],
)  # fmt: skip
def test_misuse(code: str, n: int, free: bool, why: str) -> None:
    with pytest.raises(ptxsim.SimError, match=why):
        body(code, n, free).launch("k", 1, 32, [])


def test_copy_from_shared_memory() -> None:
    code = (
        ".shared .align 1024 .b8 s[2048]; mov.u32 %r3, %tid.x; mov.u32 %r4, s;"
        + "".join(
            f"mad.lo.u32 %r5, %r3, 64, %r4; mad.lo.u32 %r6, %r3, 16, {i}; st.shared.u32 [%r5+{4 * i}], %r6;"
            for i in range(16)
        )
        + "fence.proxy.async.shared::cta; bar.warp.sync -1; mov.u32 %r7, bar; setp.eq.u32 %p1, %r3, 0; @!%p1 bra J;"
        "mbarrier.init.shared::cta.b64 [%r7], 1; fence.mbarrier_init.release.cluster; shr.u32 %r8, %r4, 4; cvt.u64.u32 %rd2, %r8;"
        "or.b64 %rd2, %rd2, 0x0000400800080000; or.b64 %rd2, %rd2, 0x0000400000000000;"
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r2], %rd2;"
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r7]; J: bar.warp.sync -1;"
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0; @!%p2 bra W; tcgen05.fence::after_thread_sync;"
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r10, %r11, %r12, %r13}, [%r2]; tcgen05.wait::ld.sync.aligned;"
        "ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r3, 16, %rd1; st.global.v4.u32 [%rd1], {%r10, %r11, %r12, %r13};"
    )
    out = np.zeros((32, 4), "u4")
    module = body(
        code.replace("mov.u32 %r7, bar;", ".shared .align 8 .b8 bar[8]; mov.u32 %r7, bar;"), params=".param .u64 out"
    )
    module.launch("k", 1, 32, [out], mode="late")
    # No swizzle, K-major: row r at (r % 8) * 16 + (r // 8) * SBO, with SBO = 128; thread t wrote words 16 t + i at 64 t + 4 i.
    want = [[(r % 8 * 16 + r // 8 * 128) // 4 + i for i in range(4)] for r in range(32)]
    assert out.tolist() == want
