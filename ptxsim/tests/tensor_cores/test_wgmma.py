# ruff: noqa: E501 (lines of PTX and CUDA are kept whole)
"""wgmma operands and fragments against formulas from the ISA: layouts, majors, types, register A, poison."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import ptxsim
from ptxsim.tensor_cores.operand import add_fp8_products
from simtest.single import HEADER

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
         "tf32": np.float32, "s8": np.int8}  # fmt: skip
LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}


def place(matrix: np.ndarray, span: int, mn_major: bool) -> tuple[np.ndarray, int, int]:
    """Lay a matrix [mn, k] out in 1024-aligned bytes in the canonical layout; return bytes, LBO and SBO.

    K-major: 8-row groups of rows of ``span`` bytes (16 without swizzle). MN-major: 8-k groups, ``span`` bytes of mn.
    """
    item = matrix.itemsize
    mn, k = matrix.shape
    raw = np.zeros(64 * 1024, "u1")
    source = np.ascontiguousarray(matrix).view("u1").reshape(mn, k, item)
    if mn_major:
        width = span or 16
        sbo_bytes = 8 * width if span else 128 * (k // 8)
        lbo_bytes = 8 * width * (k // 8) if span else 128
        lbo, sbo = lbo_bytes, sbo_bytes
    else:
        width = span or 16
        lbo, sbo = (16, 8 * width) if span else (128, 128 * (k * item // 16))
    for r in range(mn):
        for c in range(k):
            if mn_major:
                byte = r * item
                if span:
                    at = byte % span + c % 8 * span + byte // span * lbo + c // 8 * sbo
                else:
                    at = byte % 16 + c % 8 * 16 + byte // 16 * sbo + c // 8 * lbo
            else:
                byte = c * item
                if span:
                    at = byte + r % 8 * span + r // 8 * sbo
                else:
                    at = byte % 16 + byte // 16 * lbo + r % 8 * 16 + r // 8 * sbo
            if span:
                at ^= (at >> 7 & (span // 16 - 1)) << 4
            raw[at : at + item] = source[r, c]
    return raw, lbo, sbo


def descriptor(lbo: int, sbo: int, span: int) -> int:
    """Return the descriptor's bits above the start address."""
    return lbo // 16 << 16 | sbo // 16 << 32 | LAYOUT[span] << 62


def build(n: int, k: int, kind: str, out: str, tail: str, register_a: bool, size_a: int, size_b: int) -> str:
    """Return PTX that copies both operands to shared memory, multiplies once and dumps D's registers."""
    count = n // 4 if out == "f16" else n // 2
    regs = ", ".join(f"%d{i}" for i in range(count))
    reg_type = "f32" if out == "f32" else "b32"
    a = "{%a0, %a1, %a2, %a3}" if register_a else "%rd4"
    loads = "".join(f"ld.global.u32 %a{i}, [%rd7+{512 * i}];" for i in range(4)) if register_a else ""
    stores = "".join(f"st.global.{reg_type} [%rd6+{512 * i}], %d{i};" for i in range(count))
    copy = (
        "mov.u32 %r5, %r1; {0}: cvt.u64.u32 %rd8, %r5; add.u64 %rd9, %rd8, {2}; mul.lo.u32 %r6, %r5, 1; ld.global.u32 %r7, [%rd9];"
        "add.u32 %r8, %r2, %r6; add.u32 %r8, %r8, {1}; st.shared.u32 [%r8], %r7; add.u32 %r5, %r5, 512; setp.lt.u32 %p1, %r5, {3}; @%p1 bra {0};"
    )
    return (
        HEADER.replace("sm_100a", "sm_90a")
        + f"""
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 da, .param .u64 db, .param .u64 out, .param .u64 ra)
{{
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<4>; .reg .{reg_type} %d<{count}>; .reg .b32 %a<4>;
.shared .align 1024 .b8 s[{size_a + size_b}];
mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, s; ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];
{copy.format("A", 0, "%rd1", size_a)}
{copy.format("B", size_a, "%rd2", size_b)}
fence.proxy.async.shared::cta; bar.sync 0;
shr.u32 %r3, %r2, 4; cvt.u64.u32 %rd3, %r3; ld.param.u64 %rd4, [da]; or.b64 %rd4, %rd4, %rd3;
add.u32 %r4, %r2, {size_a}; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd3, %r4; ld.param.u64 %rd5, [db]; or.b64 %rd5, %rd5, %rd3;
ld.param.u64 %rd7, [ra]; mad.wide.u32 %rd7, %r0, 4, %rd7; {loads}
setp.ne.u32 %p2, %r0, %r0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.{out}.{kind}.{kind} {{{regs}}}, {a}, %rd5, %p2{tail};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
ld.param.u64 %rd6, [out]; mad.wide.u32 %rd6, %r0, 4, %rd6; {stores}
ret;
}}
"""
    )


def collect(out: np.ndarray, n: int) -> np.ndarray:
    """Gather D from its registers by the ISA's fragment table."""
    d = np.zeros((64, n), out.dtype)
    for t in range(128):
        w, g, c = t // 32, t % 32 // 4, t % 4
        for i in range(n // 2):
            d[16 * w + g + 8 * (i // 2 & 1), 8 * (i // 4) + 2 * c + (i & 1)] = out[i, t]
    return d


def multiply(kind: str, n: int, span_a: int, span_b: int, a_mn: bool, b_mn: bool, register_a: bool = False) -> None:
    """Run one wgmma and compare."""
    rng = np.random.default_rng(n)
    depth = {"bf16": 16, "f16": 16, "tf32": 8}.get(kind, 32)
    if kind == "s8":
        a, b = (rng.integers(-128, 128, (r, depth)).astype("i1") for r in (64, n))
    else:
        a, b = (rng.integers(-4, 5, (r, depth)).astype(TYPES[kind]) for r in (64, n))
    (raw_a, lbo_a, sbo_a), (raw_b, lbo_b, sbo_b) = place(a, span_a, a_mn), place(b, span_b, b_mn)
    tail = "" if kind == "s8" else ", 1, 1"
    if kind in ("bf16", "f16"):
        tail += f", {int(b_mn)}" if register_a else f", {int(a_mn)}, {int(b_mn)}"
    output = "s32" if kind == "s8" else "f32"
    out = np.zeros((n // 2, 128), "i4" if kind == "s8" else "f4")
    words = np.ascontiguousarray(a).view("u4").reshape(64, -1)
    regs = np.zeros((4, 128), "u4")
    for t in range(128):
        w, g, c = t // 32, t % 32 // 4, t % 4
        for j in range(4):
            regs[j, t] = words[16 * w + g + 8 * (j & 1), c + 4 * (j >> 1)]
    size = 16384
    ptx = build(n, depth, kind, output, tail, register_a, size, size)
    args = [raw_a, raw_b, descriptor(lbo_a, sbo_a, span_a), descriptor(lbo_b, sbo_b, span_b), out, regs]
    ptxsim.Module(ptx).launch("k", 1, 128, args, mode="late")
    want = a.astype("f8") @ b.astype("f8").T
    np.testing.assert_array_equal(collect(out, n), want)


SYNC = "fence.proxy.async.shared::cta; bar.sync 0;"
OWN = (
    "shr.u32 %r9, %r0, 5; and.b32 %r10, %r0, 31; shl.b32 %r9, %r9, 9; mad.lo.u32 %r5, %r10, 4, %r9; add.u32 %r9, %r9, 512; A:",
    "add.u32 %r5, %r5, 128; setp.lt.u32 %p1, %r5, %r9; @%p1 bra A;",
)


def staged(rows: tuple[str, str], sync: str) -> str:
    """Return a kernel that writes A after B and the barrier: ``rows`` tell which words a warp writes, then ``sync``."""
    ptx = build(64, 16, "bf16", "f32", ", 1, 1, 0, 0", False, 2048, 16384)
    copy = ptx[ptx.index("mov.u32 %r5, %r1; A:") : ptx.index("mov.u32 %r5, %r1; B:")]
    loop = copy.replace("mov.u32 %r5, %r1; A:", rows[0]).replace(
        "add.u32 %r5, %r5, 512; setp.lt.u32 %p1, %r5, 2048; @%p1 bra A;", rows[1]
    )
    return ptx.replace(copy, "").replace(SYNC, SYNC + loop + sync)


@pytest.mark.parametrize(
    ("own", "sync", "why"),
    [
        (True, "fence.proxy.async.shared::cta; bar.warp.sync -1;", ""),
        (True, "bar.warp.sync -1;", "no proxy fence makes it visible"),
        (False, "fence.proxy.async.shared::cta; bar.warp.sync -1;", "reads after a write of .* without synchronisation$"),
        (False, "setp.ge.u32 %p3, %r0, 96; @!%p3 fence.proxy.async.shared::cta; bar.sync 1;", "reads after a write of .*warp 3 without .*no proxy fence"),
        (False, "fence.proxy.async.shared::cta; bar.sync 1;", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["early", "late", "random"])
def test_each_warp_reads_its_own_rows_of_a(own: bool, sync: str, why: str, mode: str) -> None:
    """FlashAttention-3 writes, fences and multiplies P with no barrier between the warps of a warpgroup."""
    rows = OWN if own else ("mov.u32 %r5, %r1; A:", "add.u32 %r5, %r5, 512; setp.lt.u32 %p1, %r5, 2048; @%p1 bra A;")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (64, 16)).astype(TYPES["bf16"]) for _ in range(2))
    (raw_a, lbo_a, sbo_a), (raw_b, lbo_b, sbo_b) = place(a, 0, False), place(b, 0, False)
    out = np.zeros((32, 128), "f4")
    args = [raw_a, raw_b, descriptor(lbo_a, sbo_a, 0), descriptor(lbo_b, sbo_b, 0), out, np.zeros((4, 128), "u4")]
    module = ptxsim.Module(staged(rows, sync))
    if why:
        with pytest.raises(ptxsim.RaceError) as caught:
            module.launch("k", 1, 128, args, mode=mode)
        assert re.search(why, caught.value.finding.message), caught.value.finding.message
        return
    module.launch("k", 1, 128, args, mode=mode)
    np.testing.assert_array_equal(collect(out, 64), a.astype("f8") @ b.astype("f8").T)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (True, False), (False, True), (True, True)])
def test_layouts_and_majors(span: int, a_mn: bool, b_mn: bool) -> None:
    multiply("bf16", 64, span, span, a_mn, b_mn)


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_widths(n: int) -> None:
    multiply("f16", n, 128, 32, False, False)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "tf32", "s8"])
def test_types(kind: str) -> None:
    multiply(kind, 32, 128, 128, False, False)


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "tf32"])
def test_a_in_registers(kind: str) -> None:
    multiply(kind, 16, 128, 64, False, kind == "bf16", True)


def custom(
    kinds: tuple[str, str], out: str, *, tail: str = ", 1, 1", scale_d: bool = False, n: int = 16, start: int = 0, base: int = 0,
    span: int = 128, extra: str = "",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Run one wgmma on given types; return D, the product and what D's registers held before."""
    rng = np.random.default_rng(n)
    depth = {"bf16": 16, "f16": 16, "tf32": 8}.get(kinds[0], 32)
    matrices = []
    for kind, rows in zip(kinds, (64, n), strict=True):
        low, high = {"u8": (0, 256), "s8": (-128, 128)}.get(kind, (-4, 5))
        matrices.append(rng.integers(low, high, (rows, depth)).astype(TYPES.get(kind, np.uint8)))
    a, b = matrices
    (raw_a, lbo_a, sbo_a), (raw_b, lbo_b, sbo_b) = place(a, span, False), place(b, span, False)
    # The pattern of A starts at byte ``start`` instead of 0.
    raw_a = np.concatenate([np.zeros(start, "u1"), raw_a])[:65536].copy()
    ptx = build(n, depth, ".".join(kinds), out, tail, False, 16384, 16384)
    ptx = ptx.replace(f"{out}.{'.'.join(kinds)}.{'.'.join(kinds)}", f"{extra}{out}.{'.'.join(kinds)}")
    count = n // 4 if out == "f16" else n // 2
    if scale_d:
        ptx = ptx.replace("setp.ne.u32 %p2, %r0, %r0;", "setp.eq.u32 %p2, %r0, %r0;")
        fill = {
            "f32": "cvt.rn.f32.u32 %d{i}, %r19;",
            "s32": "add.u32 %d{i}, %r19, 0x7FFFFF00;",
            "f16": "mov.b32 %d{i}, 0x4400BC00;",
        }[out]
        regs = "rem.u32 %r19, %r0, 5;" + "".join(fill.format(i=i) for i in range(count))
        ptx = ptx.replace("wgmma.fence", regs + "wgmma.fence")
    result = np.zeros((count, 128), "f4" if out == "f32" else "i4")
    descriptor_a = descriptor(lbo_a, sbo_a, span) + (start >> 4 | base << 49)
    args = [raw_a, raw_b, descriptor_a, descriptor(lbo_b, sbo_b, span), result, np.zeros((4, 128), "u4")]
    ptxsim.Module(ptx).launch("k", 1, 128, args, mode="late")
    start_value = np.arange(128) % 5
    if out == "f16":
        halves = result.view("u4")
        pairs = np.stack([halves & 0xFFFF, halves >> np.uint32(16)], 1).reshape(2 * count, 128).astype("u2").view("f2")
        before = collect(np.tile(np.array([-1.0, 4.0])[:, None], (count, 128)), n)
        return collect(pairs.astype("f8"), n), a.astype("f8") @ b.astype("f8").T, before
    before = np.tile(start_value + (0x7FFFFF00 if out == "s32" else 0), (count, 1)).astype("f8")
    return collect(result.astype("f8"), n), a.astype("f8") @ b.astype("f8").T, collect(before, n)


@pytest.mark.parametrize("kinds", [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("s8", "u8"), ("u8", "s8"), ("u8", "u8")])
def test_mixed_types(kinds: tuple[str, str]) -> None:
    integer = kinds[0] in ("s8", "u8")
    got, product, _ = custom(kinds, "s32" if integer else "f32", tail="" if integer else ", 1, 1")
    np.testing.assert_array_equal(got, product)


@pytest.mark.parametrize("kinds", [("f16", "f16"), ("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_f16_accumulators(kinds: tuple[str, str]) -> None:
    tail = ", 1, 1, 0, 0" if kinds[0] == "f16" else ", 1, 1"
    got, product, _ = custom(kinds, "f16", tail=tail)
    np.testing.assert_array_equal(got, product)
    got, product, before = custom(kinds, "f16", tail=tail, scale_d=True)
    np.testing.assert_array_equal(got, product + before)


@pytest.mark.parametrize(("a", "b"), [(-1, 1), (1, -1), (-1, -1)])
def test_negation_and_accumulation(a: int, b: int) -> None:
    got, product, before = custom(("bf16", "bf16"), "f32", tail=f", {a}, {b}, 0, 0", scale_d=True)
    np.testing.assert_array_equal(got, before + a * b * product)


def test_integers_wrap_or_saturate() -> None:
    got, product, before = custom(("u8", "u8"), "s32", tail="", scale_d=True)
    assert (before + product).max() > 2**31
    np.testing.assert_array_equal(got, (before + product).astype("i8").astype("i4"))
    got, *_ = custom(("u8", "u8"), "s32", tail="", scale_d=True, extra="satfinite.")
    np.testing.assert_array_equal(got, np.minimum(before + product, 2**31 - 1))


@pytest.mark.parametrize(("span", "start"), [(128, 384), (128, 896), (64, 128), (64, 384), (32, 128)])
def test_base_offset(span: int, start: int) -> None:
    """A pattern that starts at ``start``, not at its natural alignment: base offset = (start >> 7) & 7."""
    tail = ", 1, 1, 0, 0"
    got, product, _ = custom(("f16", "f16"), "f32", tail=tail, start=start, base=start >> 7 & 7, span=span)
    np.testing.assert_array_equal(got, product)
    wrong, product, _ = custom(("f16", "f16"), "f32", tail=tail, start=start, base=0, span=span)
    assert (wrong != product).any()


@pytest.mark.parametrize(
    "form",
    ["m64n16k16.f16.bf16.bf16", "m64n16k32.f32.s8.s8", "m64n16k32.s32.e4m3.e4m3", "m64n40k32.s32.s8.s8", "m64n16k8.f32.bf16.bf16",
     "m64n12k16.f32.bf16.bf16", "m64n16k32.f32.e4m3.s8", "m64n16k16.satfinite.f32.f16.f16", "sp.m64n16k32.f32.f16.f16", "m64n16k256.s32.b1.b1"],
)  # fmt: skip
def test_forms_that_do_not_exist_or_are_not_modelled(form: str) -> None:
    ptx = build(16, 16, "bf16", "f32", ", 1, 1, 0, 0", False, 16384, 16384)
    ptx = ptx.replace("m64n16k16.f32.bf16.bf16", form)
    assert form in ptx
    with pytest.raises(ptxsim.UnknownInstruction, match="line.*sparse products" if form[:2] == "sp" else "line"):
        ptxsim.Module(ptx).launch(
            "k", 1, 128, [np.zeros(65536, "u1")] * 2 + [0, 0, np.zeros((8, 128), "f4"), np.zeros((4, 128), "u4")]
        )


@pytest.mark.parametrize("bit", [14, 31, 46, 52, 61])
def test_reserved_descriptor_bits(bit: int) -> None:
    from ptxsim.tensor_cores.wgmma import decode_descriptor

    assert decode_descriptor(1 << 62 | 64 << 32 | 5).start == 80
    with pytest.raises(ptxsim.DescriptorError, match="reserved"):
        decode_descriptor(1 << 62 | 1 << bit)
    with pytest.raises(ptxsim.DescriptorError, match="base offset without a swizzle"):
        decode_descriptor(1 << 49)
    assert decode_descriptor(1 << 62 | 5 << 49).base == 5


def test_groups_on_one_accumulator_finish_one_after_the_other() -> None:
    """A wait for the first group must not hand out D while the second is in flight, however far apart the warps are."""
    ptx = build(16, 16, "bf16", "f32", ", 1, 1, 0, 0", False, 16384, 16384)
    (first,) = [line for line in ptx.splitlines() if line.startswith("wgmma.mma_async")]
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    again = first.replace("%p2", "1")
    delay = "shr.u32 %r9, %r0, 5; L: sub.u32 %r9, %r9, 1; setp.ge.s32 %p3, %r9, 0; @%p3 bra L;"
    groups = (
        f"wgmma.commit_group.sync.aligned; {again} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;"
    )
    ptx = ptx.replace(end, groups + "wgmma.wait_group.sync.aligned 0;").replace(first, delay + first)
    a, b = np.ones((64, 16), TYPES["bf16"]), np.ones((16, 16), TYPES["bf16"])
    (raw_a, lbo_a, sbo_a), (raw_b, lbo_b, sbo_b) = place(a, 128, False), place(b, 128, False)
    for seed in range(8):
        out = np.zeros((8, 128), "f4")
        args = [raw_a, raw_b, descriptor(lbo_a, sbo_a, 128), descriptor(lbo_b, sbo_b, 128), out, np.zeros(4, "u4")]
        ptxsim.Module(ptx).launch("k", 1, 128, args, mode="random", seed=seed)
        assert (out == 32).all()


@pytest.mark.parametrize(("tokens", "size"), [(1024, 0.9861), (8192, 0.8544)])
def test_long_sums_of_8_bit_products_lose_size_as_on_a_gpu(tokens: int, size: float) -> None:
    """The same attention, with values of mean 1 and deviation 0.5 summed by wgmma alone, was read on an H200."""
    rng = np.random.default_rng(0)
    keys = (rng.standard_normal((tokens, 576)) * 0.5 + 1).astype(TYPES["e4m3"]).astype("f4")
    q = rng.standard_normal((8, 576)).astype(TYPES["e4m3"]).astype("f4")
    scores = q @ keys.T * np.float32(576**-0.5 * 1.4426950408889634)
    reference, total, sums = np.full((8, 1), -1e30), np.zeros((8, 1)), np.zeros((16, 8), "f4")
    for i in range(0, tokens, 64):  # the reference of a row moves when a score is above it by more than 4
        top = scores[:, i : i + 64].max(1, keepdims=True)
        moved = np.where(top > reference + 4, top, reference)
        decay, reference = np.exp2(reference - moved), moved
        weights = np.exp2(4 + scores[:, i : i + 64] - reference)
        total = total * decay + weights.sum(1, keepdims=True)
        sums *= decay[:, 0].astype("f4")
        rounded = weights.astype(TYPES["e4m3"]).astype("f4")
        for k in (0, 32):
            columns = keys[i + k : i + k + 32, :16].T
            sums = add_fp8_products(columns, rounded[:, k : k + 32], sums, ("e4m3", "e4m3"))
    weights = np.exp2(scores.astype("f8"))
    exact = weights @ keys[:, :16] / weights.sum(1, keepdims=True)
    assert abs(((sums.T / total) * exact).sum() / (exact * exact).sum() - size) < 1e-3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("factors", "total"),
    [
        ([(1, 1), (2**-6, 2**-7)], 1 + 2**-13),
        ([(1, 1), (2**-7, 2**-7), (2**-7, 2**-7)], 1),  # each is cut off
        ([(1.5, 1.5), (2**-6, 2**-7), (2**-6, 2**-7)], 2.25 + 2**-12),  # exponents come from the factors
        ([(2, 1), (2**-6, 2**-7), (2**-6, 2**-7)], 2),
        ([(1.5, 1.5), (2**-6, 2**-7)], 2.25),  # the sum is cut off, too
        ([(2**-9, 2**-9)], 2**-18),
    ],
)
def test_8_bit_products_are_cut_off(factors: list[tuple[float, float]], total: float, sign: int) -> None:
    """Towards zero, 13 bits below the largest exponent."""
    a, b = np.zeros((2, 1, 32), "f4")
    a[0, : len(factors)], b[0, : len(factors)] = np.transpose(factors)
    assert add_fp8_products(sign * a, b, None, ("e4m3", "e4m3")) == sign * total
    a[0, 0], beside = 0, sign * np.full((1, 1), factors[0][0] * factors[0][1], "f4")  # one of the terms, too
    if beside == sign or len(factors) == 1:
        assert add_fp8_products(sign * a, b, beside, ("e4m3", "e4m3")) == sign * total


def test_zeros_cut_nothing_off() -> None:
    a, b = np.zeros((2, 1, 32), "f4")
    b[...] = 448
    before = np.full((1, 1), 1.5 * 2.0**-60, "f4")
    assert add_fp8_products(a, b, before, ("e4m3", "e4m3")) == before


def test_8_bit_products_pass_nan_and_infinity_on() -> None:
    a, b = np.ones((2, 2, 32), "f4")
    a[0, 3], b[1, 5] = np.nan, np.inf
    np.testing.assert_array_equal(add_fp8_products(a, b, None, ("e5m2", "e5m2")), [[np.nan, np.nan], [32, np.inf]])
