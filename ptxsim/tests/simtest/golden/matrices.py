# ruff: noqa: E501 (lines of PTX are kept whole)
"""Golden cases of matrix instructions, copies and clusters: PTX written out for a list of forms, with fresh data."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from simtest.golden.case import Case

HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .b32 %r<60>; .reg .b64 %d<20>; .reg .pred %p<9>; .reg .b16 %h<9>;"
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
         "tf32": np.float32, "f32": np.float32, "f64": np.float64, "s8": np.int8, "u8": np.uint8, "s32": np.int32}  # fmt: skip


def small(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Return small integers in an element type: sums of their products are exact in every accumulator."""
    return rng.integers(0 if kind == "u8" else -3, 4, shape).astype(TYPES[kind])


def entry(params: str, code: str, name: str = "k") -> str:
    """Return PTX of one kernel; the dynamic shared memory is ``s``."""
    head = HEADER + (".extern .shared .align 1024 .b8 s[];\n" if ".b8 s[" not in code else "")
    return head + f".visible .entry {name}({params})\n{{\n{REGISTERS}\n{code}\nret;\n}}\n"


# ---- warp-level matrices -------------------------------------------------------------------------------------------
#: Shape, types of D A B C, registers of A, B and C (and D).
MMA = [
    ("m16n8k16", "f32.bf16.bf16.f32", 4, 2, 4), ("m16n8k8", "f32.bf16.bf16.f32", 2, 1, 4),
    ("m16n8k16", "f32.f16.f16.f32", 4, 2, 4), ("m16n8k8", "f32.f16.f16.f32", 2, 1, 4),
    ("m16n8k16", "f16.f16.f16.f16", 4, 2, 2), ("m16n8k8", "f16.f16.f16.f16", 2, 1, 2),
    ("m16n8k8", "f32.tf32.tf32.f32", 4, 2, 4), ("m16n8k4", "f32.tf32.tf32.f32", 2, 1, 4),
    ("m16n8k32", "f32.e4m3.e5m2.f32", 4, 2, 4), ("m16n8k16", "f32.e5m2.e4m3.f32", 2, 1, 4),
    ("m16n8k32", "f16.e4m3.e4m3.f16", 4, 2, 2), ("m16n8k32", "s32.s8.u8.s32", 4, 2, 4),
    ("m16n8k16", "s32.u8.s8.s32", 2, 1, 4), ("m8n8k16", "s32.s8.s8.s32", 1, 1, 2),
    ("m8n8k4", "f64.f64.f64.f64", 1, 1, 2), ("m16n8k4", "f64.f64.f64.f64", 2, 1, 4),
    ("m16n8k8", "f64.f64.f64.f64", 4, 2, 4), ("m16n8k16", "f64.f64.f64.f64", 8, 4, 4),
]  # fmt: skip


def mma(rng: np.random.Generator, table: list[tuple]) -> Iterator[Case]:
    """Yield mma.sync in the shapes of a table: registers come from an array and go to one."""
    for shape, types, na, nb, nc in table:
        kinds = types.split(".")
        width = 8 if kinds[0] == "f64" else 4
        reg, bits = ("d", "b64") if width == 8 else ("r", "b32")
        data = [
            small(rng, k, 32, n * width // np.dtype(TYPES[k]).itemsize)
            for k, n in zip(kinds[1:], (na, nb, nc), strict=True)
        ]
        flat = np.concatenate([x.view("u1").reshape(32, -1) for x in data], 1)
        count = na + nb + nc
        lists = iter(range(10 if reg == "r" else 2, 10 + count))
        names = [[f"%{'m' + reg}{next(lists)}" for _ in range(n)] for n in (na, nb, nc)]
        loads = "".join(
            f"ld.global.{bits} {name}, [%d1+{i * width}];" for i, name in enumerate(n for part in names for n in part)
        )
        outs = [f"%o{i}" for i in range(nc)]
        groups = ", ".join("{" + ", ".join(part) + "}" for part in (outs, *names))
        stores = "".join(f"st.global.{bits} [%d2+{i * width}], {name};" for i, name in enumerate(outs))
        code = (
            f".reg .{bits} %m{reg}<40>; .reg .{bits} %o<8>; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [out];"
            f"mad.wide.u32 %d1, %r1, {count * width}, %d1; mad.wide.u32 %d2, %r1, {nc * width}, %d2; {loads}"
            f"mma.sync.aligned.{shape}.row.col.{types} {groups}; {stores}"
        )
        out = np.zeros((32, nc * width), "u1")
        text = entry(".param .u64 a, .param .u64 out", code)
        yield Case(f"mma {shape} {types}", text, "k", 1, 32, [("array", 0), ("array", 1)], [flat, out], outputs=[1])


def matrices(rng: np.random.Generator) -> Iterator[Case]:
    """Yield ldmatrix and stmatrix with rows at scattered addresses."""
    for count, trans in ((1, ""), (2, ""), (4, ""), (1, ".trans"), (2, ".trans"), (4, ".trans")):
        regs = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
        rows = rng.permutation(64)[:32].astype("u4") * 16
        image = rng.integers(0, 65536, 512).astype("u2")
        head = (
            ".shared .align 16 .b8 s[1024]; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [rows]; ld.param.u64 %d3, [out];"
            "mad.wide.u32 %d4, %r1, 4, %d2; ld.global.u32 %r2, [%d4]; mov.u32 %r3, s; add.u32 %r2, %r2, %r3;"
            "mad.wide.u32 %d5, %r1, 32, %d1; mad.lo.u32 %r4, %r1, 32, %r3;"
            "ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d5]; ld.global.v4.u32 {%r24, %r25, %r26, %r27}, [%d5+16];"
            "st.shared.v4.u32 [%r4], {%r20, %r21, %r22, %r23}; st.shared.v4.u32 [%r4+16], {%r24, %r25, %r26, %r27}; bar.sync 0;"
        )
        load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {regs}, [%r2];" + "".join(
            f"mad.wide.u32 %d6, %r1, 4, %d3; st.global.u32 [%d6+{128 * i}], %r{10 + i};" for i in range(count)
        )
        store = (
            "mul.lo.u32 %r10, %r1, 0x10003; add.u32 %r11, %r10, 0x1000; add.u32 %r12, %r10, 0x2000; add.u32 %r13, %r10, 0x3000;"
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {regs}; bar.sync 0; mad.wide.u32 %d6, %r1, 32, %d3;"
            "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r4]; ld.shared.v4.u32 {%r24, %r25, %r26, %r27}, [%r4+16];"
            "st.global.v4.u32 [%d6], {%r20, %r21, %r22, %r23}; st.global.v4.u32 [%d6+16], {%r24, %r25, %r26, %r27};"
        )
        for name, code in (("ldmatrix", load), ("stmatrix", store)):
            text = entry(".param .u64 a, .param .u64 rows, .param .u64 out", head + code)
            data = [image, rows, np.zeros(512, "u2")]
            args = [("array", 0), ("array", 1), ("array", 2)]
            yield Case(f"{name} x{count}{trans}", text, "k", 1, 32, args, data, outputs=[2])


# ---- wgmma ---------------------------------------------------------------------------------------------------------
SPAN_CODE = {0: 0, 128: 1, 64: 2, 32: 3}
B_AT = 24576


def descriptor(start: int, lbo: int, sbo: int, span: int, base: int = 0) -> int:
    """Return a matrix descriptor for a byte offset in the 1024-aligned image (the image's address is added later)."""
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | base << 49 | SPAN_CODE[span] << 62


def operand(mn: int, bits: int, depth: int, span: int, mn_major: bool) -> tuple[int, int, int]:
    """Return LBO, SBO and the byte step from one instruction's operand to the next along k, of a canonical layout.

    K-major: rows of ``span`` bytes (16 without swizzle, 8 rows a group); MN-major: the same with k along the rows.
    """
    if not span:
        group = 128
        if mn_major:  # LBO: next 8 of k; SBO: next 8 of mn
            return group * (mn // 8), group, group * (mn // 8) * (depth // 8)
        return group, group * 8, 2 * group  # two groups of k an instruction, four in all
    atom = 8 * span
    if mn_major:  # LBO: next panel of `span` bytes of mn; SBO: next 8 of k
        panels = max(1, mn * bits // 8 // span)
        return atom * 2 * depth // 8, atom, atom * depth // 8 if panels else 0
    return 16, atom, 32


def wgmma_case(name: str, rng: np.random.Generator, kinds: str, n: int, depth: int, a: list[int] | None, b: list[int], *,
               out: str = "f32", tail: str = "", scale_d: bool = False, random: bool = False, form: str = "") -> Case:  # fmt: skip
    """Return a case of chained wgmma: ``a`` (None: in registers) and ``b`` hold a descriptor per step."""
    first, second = kinds.split(".")
    image = np.concatenate(
        [
            small(rng, k, size // np.dtype(TYPES[k]).itemsize).view("u1")
            for k, size in ((first, B_AT), (second, 65536 - B_AT))
        ]
    )
    if random:
        parts = [
            (rng.standard_normal(size // np.dtype(TYPES[k]).itemsize)).astype(TYPES[k]).view("u1")
            for k, size in ((first, B_AT), (second, 65536 - B_AT))
        ]
        image = np.concatenate(parts)
    count = n // 4 if out == "f16" else n // 2
    kind = {"f32": "f32", "f16": "b32", "s32": "b32"}[out]
    regs = ", ".join(f"%x{i}" for i in range(count))
    start = {"f32": "cvt.rn.f32.s32 %x{i}, %r5;", "s32": "mov.b32 %x{i}, %r5;", "f16": "mov.b32 %x{i}, 0x3C00BC00;"}[
        out
    ]
    fill = "".join(f"add.s32 %r5, %r4, {i % 5 - 4};" + start.format(i=i) for i in range(count))
    steps = []
    for step, desc_b in enumerate(b):
        left = f"{{{', '.join(f'%r{20 + 4 * step + j}' for j in range(4))}}}"
        if a is not None:
            left = "%d5"
            steps.append(f"add.u64 %d5, %d4, {a[step]};")
        flag = "%p2" if step == 0 else "%p1"
        steps.append(f"add.u64 %d6, %d4, {desc_b};")
        steps.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{out}.{kinds}{form} {{{regs}}}, {left}, %d6, {flag}{tail};"
        )
    stores = "".join(f"st.global.{kind} [%d7+{512 * i}], %x{i};" for i in range(count))
    loads = "".join(f"ld.global.b32 %r{20 + i}, [%d9+{512 * i}];" for i in range(4 * len(b))) if a is None else ""
    code = (
        f".reg .{kind} %x<{count}>; mov.u32 %r1, %tid.x; mov.u32 %r2, s; ld.param.u64 %d1, [image];"
        "ld.param.u64 %d2, [out]; shl.b32 %r3, %r1, 4; C: cvt.u64.u32 %d3, %r3; add.u64 %d3, %d3, %d1;"
        "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d3]; add.u32 %r6, %r2, %r3; st.shared.v4.u32 [%r6], {%r10, %r11, %r12, %r13};"
        "add.u32 %r3, %r3, 2048; setp.lt.u32 %p0, %r3, 65536; @%p0 bra C; fence.proxy.async.shared::cta; bar.sync 0;"
        f"shr.u32 %r7, %r2, 4; cvt.u64.u32 %d4, %r7; rem.u32 %r4, %r1, 7; {fill} mad.wide.u32 %d9, %r1, 4, %d1; {loads}"
        f"setp.ge.u32 %p1, %r1, 0; setp.lt.s32 %p2, %r1, {1000 if scale_d else -1};"
        f"wgmma.fence.sync.aligned; {' '.join(steps)} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        f"mad.wide.u32 %d7, %r1, 4, %d2; {stores}"
    )
    result = np.zeros((count, 128), "f4" if out == "f32" else "i4")
    args = [("array", 0), ("array", 1)]
    text = entry(".param .u64 image, .param .u64 out", code)
    case = Case(f"wgmma {name}", text, "k", 1, 128, args, [image, result], 65536, outputs=[1])
    if random and first != "e4m3":  # which is modelled bit for bit
        case.ulp, case.floor = 2.0**13, 4.0
    return case


def wgmma(rng: np.random.Generator) -> Iterator[Case]:
    """Yield every layout, major, type and a choice of widths."""

    def pair(bits: int, depth: int, n: int, span: int, a_mn: bool, b_mn: bool) -> tuple[list[int], list[int]]:
        la, lb = operand(64, bits, depth, span, a_mn), operand(n, bits, depth, span, b_mn)
        steps = 2 if a_mn or b_mn or span != 32 else 1
        return ([descriptor(i * la[2], la[0], la[1], span) for i in range(steps)],
                [descriptor(B_AT + i * lb[2], lb[0], lb[1], span) for i in range(steps)])  # fmt: skip

    for span in (0, 32, 64, 128):
        for a_mn in (0, 1):
            for b_mn in (0, 1):
                n = 128 if b_mn and span == 128 else 64 if b_mn else 32
                a, b = pair(16, 16, n, span, bool(a_mn), bool(b_mn))
                tail = f", 1, 1, {a_mn}, {b_mn}"
                yield wgmma_case(f"bf16 {span} major {a_mn}{b_mn}", rng, "bf16.bf16", n, 16, a, b, tail=tail)
                if not a_mn:
                    yield wgmma_case(
                        f"f16 RS {span} major {b_mn}", rng, "f16.f16", n, 16, None, b, tail=f", 1, 1, {b_mn}"
                    )
        for kinds, depth, out in (("tf32.tf32", 8, "f32"), ("e4m3.e5m2", 32, "f32"), ("s8.u8", 32, "s32")):
            a, b = pair(32 if depth == 8 else 8, depth, 16, span, False, False)
            tail = ", 1, 1" if out == "f32" else ""
            yield wgmma_case(f"{kinds} {span}", rng, kinds, 16, depth, a, b, out=out, tail=tail, scale_d=True)
    plain = pair(16, 16, 256, 128, False, False)
    for n in (8, 24, 96, 256):
        yield wgmma_case(f"n{n}", rng, "f16.f16", n, 16, *plain, tail=", 1, 1, 0, 0", scale_d=True)
    yield wgmma_case("negated", rng, "bf16.bf16", 16, 16, *plain, tail=", -1, 1, 0, 0", scale_d=True)
    yield wgmma_case("negated twice", rng, "bf16.bf16", 16, 16, *plain, tail=", -1, -1, 0, 0")
    yield wgmma_case("f16 accumulator", rng, "f16.f16", 32, 16, *plain, out="f16", tail=", 1, 1, 0, 0", scale_d=True)
    fp8 = pair(8, 32, 32, 128, False, False)
    yield wgmma_case("e5m2 f16 accumulator", rng, "e5m2.e4m3", 32, 32, *fp8, out="f16", tail=", 1, 1")
    yield wgmma_case("e4m3 RS", rng, "e4m3.e4m3", 32, 32, None, fp8[1], tail=", 1, 1", scale_d=True)
    yield wgmma_case("u8 RS", rng, "u8.s8", 32, 32, None, fp8[1], out="s32")
    yield wgmma_case("tf32 RS", rng, "tf32.tf32", 32, 8, None, pair(32, 8, 32, 128, False, False)[1], tail=", 1, 1")
    # Starts inside a 1024-byte atom: without and with the base offset, and strides that are not canonical.
    for shift in (128, 384, 896):
        for base in (0, shift // 128):
            desc = [descriptor(shift, 16, 1024, 128, base)]
            b = [descriptor(B_AT + shift, 16, 1024, 128, base)]
            yield wgmma_case(f"start {shift} base {base}", rng, "bf16.bf16", 32, 16, desc, b, tail=", 1, 1, 0, 0")
    a, b = [descriptor(512, 16, 1280, 64)], [descriptor(B_AT + 256, 48, 2304, 32)]
    yield wgmma_case("odd strides", rng, "bf16.bf16", 64, 16, a, b, tail=", 1, 1, 0, 0")
    a, b = [descriptor(64, 256, 1152, 0)], [descriptor(B_AT + 48, 2304, 272, 0)]
    yield wgmma_case("odd strides, no swizzle", rng, "bf16.bf16", 64, 16, a, b, tail=", 1, 1, 0, 1")
    for kinds, depth, tail in (("bf16.bf16", 16, ", 1, 1, 0, 0"), ("e4m3.e4m3", 32, ", 1, 1")):
        a, b = pair(16 if depth == 16 else 8, depth, 16, 128, False, False)
        yield wgmma_case(f"random {kinds}", rng, kinds, 16, depth, a, b, tail=tail, random=True)


def cases() -> Iterator[Case]:
    """Yield the matrix cases."""
    rng = np.random.default_rng(5)
    yield from mma(rng, MMA)
    yield from matrices(rng)
    yield from wgmma(rng)
