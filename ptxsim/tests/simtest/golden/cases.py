# ruff: noqa: E501 (the table of instructions)
"""Every golden case: single instructions, the tables of rows.py, matrices.py, warp_products.py, copies.py and the compiled test kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simtest.golden import copies, matrices, more_copies, warp_products
from simtest.golden.case import Case, Map
from simtest.golden.rows import LANES, TABLES, given, inputs, kernel, rows
from simtest.nvrtc import KERNELS
from simtest.runners import bf16
from simtest.single import EDGES32, FLOATS, program

# Instruction, inputs (i: integer edge values, f: floats), output type, tolerance in units of 2**-23 (0: bit for bit).
INSTRUCTIONS = [
    ("add.sat.s32 %d, %a, %b;", "iii", "u4", 0), ("mul.hi.s32 %d, %a, %b;", "iii", "u4", 0),
    ("mad.lo.u32 %d, %a, %b, %c;", "iii", "u4", 0), ("div.u32 %d, %a, %b;", "iii", "u4", 0),
    ("rem.s32 %d, %a, %b;", "iii", "u4", 0), ("shl.b32 %d, %a, %b;", "iii", "u4", 0),
    ("shr.s32 %d, %a, %b;", "iii", "u4", 0), ("shf.l.wrap.b32 %d, %a, %b, %c;", "iii", "u4", 0),
    ("shf.r.clamp.b32 %d, %a, %b, %c;", "iii", "u4", 0), ("lop3.b32 %d, %a, %b, %c, 0x1A;", "iii", "u4", 0),
    ("bfe.s32 %d, %a, %b, 8;", "iii", "u4", 0), ("bfe.u32 %d, %a, 28, %b;", "iii", "u4", 0),
    ("bfi.b32 %d, %a, %b, %c, 12;", "iii", "u4", 0), ("bfind.s32 %d, %a;", "iii", "u4", 0),
    ("brev.b32 %d, %a;", "iii", "u4", 0), ("clz.b32 %d, %a;", "iii", "u4", 0), ("popc.b32 %d, %a;", "iii", "u4", 0),
    ("prmt.b32 %d, %a, %b, %c;", "iii", "u4", 0), ("prmt.b32.ecl %d, %a, %b, %c;", "iii", "u4", 0),
    ("dp4a.s32.u32 %d, %a, %b, %c;", "iii", "u4", 0), ("fns.b32 %d, %a, 5, 3;", "iii", "u4", 0),
    ("szext.clamp.s32 %d, %a, %b;", "iii", "u4", 0), ("bmsk.wrap.b32 %d, %a, %b;", "iii", "u4", 0),
    ("add.f32 %d, %a, %b;", "fff", "f4", 0), ("mul.ftz.f32 %d, %a, %b;", "fff", "f4", 0),
    ("fma.rn.f32 %d, %a, %b, %c;", "fff", "f4", 0), ("fma.rz.f32 %d, %a, %b, %c;", "fff", "f4", 0),
    ("add.rm.f32 %d, %a, %b;", "fff", "f4", 0), ("add.sat.f32 %d, %a, %b;", "fff", "f4", 0),
    ("min.f32 %d, %a, %b;", "fff", "f4", 0), ("max.NaN.f32 %d, %a, %b;", "fff", "f4", 0),
    ("div.rn.f32 %d, %a, %b;", "fff", "f4", 0), ("rcp.rn.f32 %d, %a;", "fff", "f4", 0), ("sqrt.rn.f32 %d, %a;", "fff", "f4", 0),
    ("ex2.approx.ftz.f32 %d, %a;", "fff", "f4", 4), ("lg2.approx.f32 %d, %a;", "fff", "f4", 8),
    ("rcp.approx.ftz.f32 %d, %a;", "fff", "f4", 2), ("rsqrt.approx.f32 %d, %a;", "fff", "f4", 4),
    ("cvt.rzi.s32.f32 %d, %a;", "fff", "i4", 0), ("cvt.rni.u32.f32 %d, %a;", "fff", "u4", 0),
    ("cvt.rn.f32.s32 %d, %a;", "iii", "f4", 0), ("cvt.rz.f32.u32 %d, %a;", "iii", "f4", 0),
    ("cvt.rn.f16.f32 %d, %a;", "fff", "u2", 0), ("cvt.rn.bf16x2.f32 %d, %a, %b;", "fff", "u4", 0),
    ("cvt.rz.bf16x2.f32 %d, %a, %b;", "fff", "u4", 0), ("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;", "fff", "u2", 0),
    ("cvt.rn.satfinite.e5m2x2.f32 %d, %a, %b;", "fff", "u2", 0), ("cvt.sat.u16.s32 %d, %a;", "iii", "u2", 0),
    ("add.rn.f16x2 %d, %a, %b;", "iii", "u4", 0), ("fma.rn.bf16x2 %d, %a, %b, %c;", "iii", "u4", 0),
    ("shfl.sync.bfly.b32 %d, %a, 5, 0x181F, -1;", "iii", "u4", 0), ("shfl.sync.up.b32 %d, %a, 3, 0x1000, -1;", "iii", "u4", 0),
    ("match.any.sync.b32 %d, %a, -1;", "iii", "u4", 0), ("redux.sync.xor.b32 %d, %a, -1;", "iii", "u4", 0),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every case, with fresh data."""
    yield from singles()
    yield from tables()
    yield from matrices.cases()
    yield from copies.cases()
    yield from more_copies.cases()
    yield from warp_products.cases()
    yield from compiled()


def singles() -> Iterator[Case]:
    """Yield the instructions that have a kernel each."""
    for code, kinds, out, ulp in INSTRUCTIONS:
        inputs = [np.roll(EDGES32 if k == "i" else FLOATS, 5 * n) for n, k in enumerate(kinds)]
        data = [*inputs, np.zeros(32, out)]
        text = program(code, inputs, data[-1]).replace("sm_100a", "sm_90a")
        yield Case(code, text, "k", 1, 32, [("array", i) for i in range(4)], data, ulp=ulp, outputs=[3])


def tables() -> Iterator[Case]:
    """Yield the tables of instructions, a kernel each."""
    for name, table in TABLES.items():
        arrays = inputs()
        wide = [np.concatenate([given(n, base) for n in range(4)]) for base in arrays.values()]
        data = [*wide, np.zeros((LANES, 4), "u8"), np.zeros((len(rows(table)), LANES), "u8")]
        args = [("array", i) for i in range(len(data))]
        text = kernel(rows(table), arrays)
        yield Case(f"table {name}", text, "k", 1, LANES, args, data, outputs=[len(data) - 1], table=name)


def compiled() -> Iterator[Case]:
    """Yield the compiled kernels of the tests."""
    gemm, exchange, ring = (
        (KERNELS / name).read_text() for name in ("hopper_gemm.cu", "cluster_exchange.cu", "cp_async_ring.cu")
    )
    rng = np.random.default_rng(0)
    a, b, c = bf16(rng, 128, 320).view("u2"), bf16(rng, 128, 320).view("u2"), np.zeros((128, 128), "u2")
    maps = [Map(i, 9, [w, 128], [2 * w], [64, 64], 3) for i, w in enumerate((320, 320, 128))]
    smem = 7 * 8192 + 64
    yield Case("hopper_gemm", gemm, "hopper_gemm", 2, 160, [*maps, 5], [a, b, c], smem, 1, 2**16, [2])
    tile = bf16(rng, 192, 64).view("u2")
    args = [Map(0, 9, [64, 192], [128], [64, 64], 3), ("array", 1), 3]
    data, smem = [tile, np.zeros((2, 64), "f4")], 8192 + 512
    yield Case("cluster_exchange", exchange, "cluster_exchange", 2, 64, args, data, smem, 2, 64, [1])
    args = [("array", 0), ("array", 1), 5]
    data = [rng.standard_normal((40, 128)).astype("f4"), np.zeros(128, "f4")]
    yield Case("cp_async_ring", ring, "cp_async_ring", 1, 64, args, data, outputs=[1])
