# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""Tensor-memory shapes against the ISA's tables and CUTLASS's copy layouts."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim
from ptxsim.tensor_cores.tcgen05 import data_path
from ptxsim.tensor_cores.tmem import fragment
from simtest.single import HEADER


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


# CUTLASS's atoms (mma_traits_sm100_frag.hpp, tmem_frg and tmem_frg_ws): row and column modes -> lane + 128 * column.
FRAGMENTS = {
    "A": (256, 2, False, ((128,), (1,)), lambda n: ((n,), (128,))),
    "B": (128, 2, False, ((64,), (1,)), lambda n: ((n // 2, 2), (128, 64))),
    "D": (128, 1, False, ((128,), (1,)), lambda n: ((n,), (128,))),
    "D ws": (128, 1, True, ((128,), (1,)), lambda n: ((n,), (128,))),
    "E": (64, 1, True, ((64,), (1,)), lambda n: ((n // 2, 2), (128, 64))),
    "F": (64, 1, False, ((16, 4), (1, 32)), lambda n: ((n,), (128,))),
    "G": (32, 1, True, ((32,), (1,)), lambda n: ((n // 4, 4), (128, 32))),
}


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_data_paths_match_cutlass(name: str, n: int) -> None:
    m, group, ws, (row_shape, row_stride), columns = FRAGMENTS[name]
    letter, parts, lanes, places = data_path(m, n, group, ws)
    assert letter == name[0]
    for r in range(m // group):
        for c in range(n):
            virtual = cute(row_shape, row_stride, r) + cute(*columns(n), c)
            part, inside = divmod(c, n // parts)
            assert (lanes[r, part], places[inside]) == (virtual % 128, virtual // 128)


ALLOC = (
    "mov.u32 %r1, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {n}; bar.sync 0;"
    "ld.shared.u32 %r2, [%r1];"
)
FREE = "bar.sync 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, {n}; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


def body(code: str, n: int = 64, free: bool = True, params: str = "", warps: int = 1) -> ptxsim.Module:
    """Return a kernel that allocates, runs code, frees (in warp 0)."""
    regs = ".reg .b32 %r<200>; .reg .b64 %rd<9>; .reg .pred %p<4>; .shared .align 16 .b8 slot[16];"
    first, last = ALLOC.replace("{n}", str(n)), FREE.replace("{n}", str(n)) if free else ""
    if warps > 1:
        other = "mov.u32 %r190, %tid.x; setp.lt.u32 %p3, %r190, 32;"
        first, last = (part.replace("tcgen05", "@%p3 tcgen05") for part in (other + first, last))
        first += "tcgen05.fence::before_thread_sync;"
        last = last.replace("bar.sync 0;", "bar.sync 0; tcgen05.fence::after_thread_sync;")
    text = first + code + last
    return ptxsim.Module(HEADER + f".visible .entry k({params})\n{{\n{regs}\n{text}\nret;\n}}\n")


PER_REPETITION = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def cell(shape: str, register: int, thread: int, split: int) -> tuple[int, int]:
    """Return (lane, column) of a register, from CUTLASS's layouts; repetitions follow each other along the columns."""
    thread_shape, thread_stride, value_shape, value_stride, row_bits = TRAITS[shape]
    repetition, inside = divmod(register, PER_REPETITION[shape])
    bit = cute(thread_shape, thread_stride, thread) + cute(value_shape, value_stride, 32 * inside)
    lane, column = bit // row_bits, bit % row_bits // 32
    if shape == "16x32bx2":  # The second half of the threads accesses taddr + the immediate.
        return lane, split * column + repetition
    return lane, column + row_bits // 32 * repetition


@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("late", 0), ("random", 5)])
@pytest.mark.parametrize("packed", [False, True], ids=["", "16b"])
@pytest.mark.parametrize(("shape", "count"), [("32x32b", 1), ("32x32b", 8), ("16x64b", 1), ("16x64b", 4), ("16x128b", 1), ("16x128b", 2),
                                              ("16x256b", 1), ("16x256b", 2), ("16x32bx2", 1), ("16x32bx2", 4)])  # fmt: skip
def test_store_and_load(shape: str, count: int, packed: bool, mode: str, seed: int) -> None:
    """Store registers through a shape in the upper half of warp 1's lanes, read whole lanes; and the other way round."""
    n, half, split = PER_REPETITION[shape] * count, 0 if shape == "32x32b" else 16, 9
    regs = ", ".join(f"%r{20 + i}" for i in range(n))
    width = 32
    lanes = ", ".join(f"%r{100 + i}" for i in range(width))
    offset = f", {split}" if shape == "16x32bx2" else ""
    back = "".join(f"ld.global.u32 %r{100 + i}, [%rd2+{4 * i}];" for i in range(width))
    access = f"{shape}.x{count}"
    code = (
        "mov.u32 %r3, %tid.x; setp.lt.u32 %p1, %r3, 32; @%p1 bra J; sub.u32 %r3, %r3, 32; add.u32 %r4, %r2, 0x200000;"
        f"add.u32 %r5, %r4, {half << 16}; ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r3, {4 * width}, %rd1;"
        f"ld.param.u64 %rd2, [lanes]; mad.wide.u32 %rd2, %r3, {4 * width}, %rd2; ld.param.u64 %rd3, [regs]; mad.wide.u32 %rd3, %r3, {4 * n}, %rd3;"
        + back + f"tcgen05.st.sync.aligned.32x32b.x{width}.b32 [%r4], {{{lanes}}}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.{access}{'.pack::16b' if packed else ''}.b32 {{{regs}}}, [%r5]{offset}; tcgen05.wait::ld.sync.aligned;"
        + "".join(f"st.global.u32 [%rd3+{4 * i}], %r{20 + i}; mad.lo.u32 %r{20 + i}, %r3, 0x20003, {0x51000 + i};" for i in range(n))
        + f"tcgen05.st.sync.aligned.{access}{'.unpack::16b' if packed else ''}.b32 [%r5]{offset}, {{{regs}}}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {{{lanes}}}, [%r4]; tcgen05.wait::ld.sync.aligned;"
        + "".join(f"st.global.u32 [%rd1+{4 * i}], %r{100 + i};" for i in range(width))
        + "tcgen05.fence::before_thread_sync; J:"
    )  # fmt: skip
    given = np.random.default_rng(count).integers(0, 1 << 32, (32, width)).astype("u4")
    out, got = np.zeros((32, width), "u4"), np.zeros((32, n), "u4")
    module = body(
        "bar.sync 0; tcgen05.fence::after_thread_sync;" + code,
        params=".param .u64 out, .param .u64 lanes, .param .u64 regs",
        warps=2,
    )
    module.launch("k", 1, 64, [out, given, got], mode=mode, seed=seed)
    want, loaded = given.copy(), np.zeros((32, n), "u4")
    for t in range(32):
        for i in range(n):
            lane, column = cell(shape, i, t, split)
            lane += half
            value = t * 0x20003 + 0x51000 + i
            if (
                packed
            ):  # A register holds 16 bits of two neighbouring columns (CUTLASS: the _16b traits' ValID layouts).
                pair = 2 * column if shape != "16x32bx2" else 2 * i + (split if t >= 16 else 0)
                loaded[t, i] = given[lane, pair] & 0xFFFF | given[lane, pair + 1] << np.uint32(16)
                want[lane, pair], want[lane, pair + 1] = value & 0xFFFF, value >> 16
            else:
                loaded[t, i] = given[lane, column]
                want[lane, column] = value
    assert got.tolist() == loaded.tolist()
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
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2]; tcgen05.wait::ld.sync.aligned; setp.eq.u32 %p1, %r3, 0; @%p1 bra X; bar.warp.sync 0xffffffff; X:",
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


MOVED = (
    "mov.u32 %r3, %tid.x; mov.b32 %r4, 0x40400000; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r4}; tcgen05.wait::st.sync.aligned;"
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r2]; {before} {after}"
    "ld.param.u64 %rd1, [out]; mad.wide.u32 %rd1, %r3, 4, %rd1; st.global.u32 [%rd1], %r11;"
)


@pytest.mark.filterwarnings("ignore::ptxsim.StrictWarning")
@pytest.mark.parametrize("mode", ["early", "late"])
def test_use_ahead_of_the_wait_is_a_rule(mode: str) -> None:
    """Compilers move arithmetic ahead of tcgen05.wait::ld; moves alone are no use; that there is no wait is another rule."""
    use, move, wait = "shl.b32 %r11, %r10, 1;", "mov.b32 %r12, %r10;", "tcgen05.wait::ld.sync.aligned;"
    out = np.zeros(32, "u4")

    def run(before: str, after: str, **options: object) -> ptxsim.Report:
        code = MOVED.replace("{before}", before).replace("{after}", after)
        out[:] = 0
        return body(code, params=".param .u64 out").launch("k", 1, 32, [out], mode=mode, **options)

    with pytest.raises(ptxsim.PoisonError):
        run(use, wait)
    for after, rules in ((wait, ["ld-wait"]), ("", ["ld-wait", "ld-no-wait"])):
        with pytest.warns(ptxsim.StrictWarning, match=r"shl.b32 %r11[^$]*tcgen05.ld in line[^$]*\[ld-wait\]"):
            report = run(use, after, strict=False)
        assert [each.rule for each in report.findings] == rules
        assert set(out) == {2 * 0x40400000 & 0xFFFFFFFF}
    with pytest.warns(ptxsim.StrictWarning), pytest.raises(ptxsim.SyncError, match=r"\[ld-no-wait\]"):
        run(use, "", allow={"ld-wait"})
    assert run(move, wait + use.replace("%r10", "%r12"), strict=False).findings == []
    assert run("", wait + use, strict=False).findings == []
    assert set(out) == {2 * 0x40400000 & 0xFFFFFFFF}
