# ruff: noqa: E501 (lines of PTX are kept whole)
"""Golden cases of wmma (products, and what fragments hold) and of mma.sp with any metadata."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simtest.golden.case import Case
from simtest.golden.matrices import entry, small

LARGE = ("m16n16k16", "m32n8k16", "m8n32k16")
#: Shapes, types of A, C and D, and registers of A, B, C and D in each shape.
WMMA = [
    (LARGE, "f16", "f32", "f32", [(8, 8, 8, 8)] * 3), (LARGE, "f16", "f16", "f16", [(8, 8, 4, 4)] * 3),
    (LARGE, "f16", "f16", "f32", [(8, 8, 4, 8)] * 3), (LARGE, "f16", "f32", "f16", [(8, 8, 8, 4)] * 3),
    (LARGE, "bf16", "f32", "f32", [(4, 4, 8, 8), (8, 2, 8, 8), (2, 8, 8, 8)]),
    (LARGE, "s8", "s32", "s32", [(2, 2, 8, 8), (4, 1, 8, 8), (1, 4, 8, 8)]),
    (LARGE, "u8", "s32", "s32", [(2, 2, 8, 8), (4, 1, 8, 8), (1, 4, 8, 8)]),
    (("m16n16k8",), "tf32", "f32", "f32", [(4, 4, 8, 8)]), (("m8n8k4",), "f64", "f64", "f64", [(1, 1, 2, 2)]),
    (("m8n8k32",), "s4", "s32", "s32", [(1, 1, 2, 2)]), (("m8n8k32",), "u4", "s32", "s32", [(1, 1, 2, 2)]),
    (("m8n8k128",), "b1", "s32", "s32", [(1, 1, 2, 2)]),
]  # fmt: skip
#: Depth, types of D, A and B, registers of A, B and C, and selectors.
SPARSE = [
    (16, "f32.f16.f16", 2, 2, 4, 4), (16, "f16.f16.f16", 2, 2, 2, 4), (32, "f32.f16.f16", 4, 4, 4, 2), (32, "f16.f16.f16", 4, 4, 2, 2),
    (16, "f32.bf16.bf16", 2, 2, 4, 4), (32, "f32.bf16.bf16", 4, 4, 4, 2), (8, "f32.tf32.tf32", 2, 2, 4, 4), (16, "f32.tf32.tf32", 4, 4, 4, 2),
    (64, "f32.e4m3.e5m2", 4, 4, 4, 1), (32, "s32.s8.u8", 2, 2, 4, 2), (64, "s32.u8.s8", 4, 4, 4, 1), (64, "s32.s4.u4", 2, 2, 4, 2),
    (128, "s32.u4.s4", 4, 4, 4, 1),
]  # fmt: skip


def _operand(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Return elements of a type; types smaller than a byte are packed."""
    if kind in ("s4", "u4", "b1"):
        return rng.integers(0, 256, count * (1 if kind == "b1" else 4) // 8).astype("u1")
    return small(rng, kind, count)


def _list(letter: str, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}"


def _products(rng: np.random.Generator) -> Iterator[Case]:
    for shapes, kind, old, out, counts in WMMA:
        for shape, (na, nb, nc, nw) in zip(shapes, counts, strict=True):
            m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
            fixed = kind in ("s4", "u4", "b1")
            width = "b64" if kind == "f64" else "b32"
            regs = "".join(f".reg .{width} %{x}<8>;" for x in "xyzw")
            loads = "".join(f"ld.param.u64 %d{i}, [p{i}];" for i in range(1, 5))
            for first, second, third in (
                (("row", "col", "row"),) if fixed else (("row", "col", "row"), ("col", "row", "col"))
            ):
                head = f"wmma.mma.{'xor.popc.' * (kind == 'b1')}sync.aligned.{first}.{second}.{shape}"
                types = f"{out}.{old}" if kind == "f16" else f"{out}.{kind}.{kind}.{old}"
                code = (
                    f"{regs}{loads}"
                    f"wmma.load.a.sync.aligned.{first}.{shape}.global.{kind} {_list('x', na)}, [%d1];"
                    f"wmma.load.b.sync.aligned.{second}.{shape}.global.{kind} {_list('y', nb)}, [%d2];"
                    f"wmma.load.c.sync.aligned.{third}.{shape}.global.{old} {_list('z', nc)}, [%d3];"
                    f"{head}.{types} {_list('w', nw)}, {_list('x', na)}, {_list('y', nb)}, {_list('z', nc)};"
                    f"wmma.store.d.sync.aligned.row.{shape}.global.{out} [%d4], {_list('w', nw)};"
                )
                data = [_operand(rng, kind, m * k), _operand(rng, kind, k * n), small(rng, old, m * n)]
                data.append(np.zeros(m * n, small(rng, out, 1).dtype))
                text = entry(", ".join(f".param .u64 p{i}" for i in range(1, 5)), code)
                args = [("array", i) for i in range(4)]
                yield Case(f"wmma {shape} {types} {first} {second} {third}", text, "k", 1, 32, args, data, outputs=[3])


def _of_two_arrays(name: str, text: str, data: list[np.ndarray]) -> Case:
    """Return a case of one warp that reads the first array and writes the second."""
    return Case(name, text, "k", 1, 32, [("array", 0), ("array", 1)], data, outputs=[1])


def _fragments() -> Iterator[Case]:
    """Yield loads of numbered bytes, whose registers are stored as they are."""
    roles = set()
    for shapes, kind, old, _, counts in WMMA:
        for shape, (na, nb, nc, _) in zip(shapes, counts, strict=True):
            roles |= {("a", shape, kind, na), ("b", shape, kind, nb), ("c", shape, old, nc)}
    for role, shape, kind, count in sorted(roles):
        fixed = {"a": ("row",), "b": ("col",)}.get(role) if kind in ("s4", "u4", "b1") else None
        for layout in fixed or ("row", "col"):
            width, size = ("b64", 8) if kind == "f64" else ("b32", 4)
            stores = "".join(f"st.global.{width} [%d2+{size * i}], %x{i};" for i in range(count))
            code = (
                f".reg .{width} %x<8>; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [out]; mov.u32 %r1, %tid.x;"
                f"wmma.load.{role}.sync.aligned.{layout}.{shape}.global.{kind} {_list('x', count)}, [%d1];"
                f"mad.wide.u32 %d2, %r1, {size * count}, %d2; {stores}"
            )
            image = np.random.default_rng(3).permutation(1024).astype("u2")
            data = [image, np.zeros((32, count), f"u{size}")]
            text = entry(".param .u64 a, .param .u64 out", code)
            yield _of_two_arrays(f"wmma {role} {layout} {shape} {kind}", text, data)


def _sparse(rng: np.random.Generator) -> Iterator[Case]:
    for depth, types, na, nb, nc, selectors in SPARSE:
        out, *kinds = types.split(".")
        for selector, head in [*((s, "sp::ordered_metadata") for s in range(selectors)), (0, "sp")]:
            codes = (
                [4, 14] if "tf32" in kinds else [4, 8, 9, 12, 13, 14, *([1, 2, 3, 6, 7, 11] if head == "sp" else [])]
            )
            metadata = (np.array(codes)[rng.integers(0, len(codes), (32, 8))] << 4 * np.arange(8)).sum(1).astype("u4")
            bits = {"tf32": 32, "f16": 16, "bf16": 16, "s4": 4, "u4": 4}.get(kinds[0], 8)
            sizes = [32 * n * 32 // b for n, b in ((na, bits), (nb, bits), (nc, 16 if out == "f16" else 32))]
            parts = [_operand(rng, k, n).view("u4").reshape(32, -1) for k, n in zip((*kinds, out), sizes, strict=True)]
            given = np.concatenate([*parts, metadata[:, None]], 1)
            names = [f"%m{i}" for i in range(na + nb + nc + 1)]
            lists = ["{" + ", ".join(x) + "}" for x in (names[:na], names[na : na + nb], names[na + nb : -1])]
            loads = "".join(f"ld.global.b32 {x}, [%d1+{4 * i}];" for i, x in enumerate(names))
            stores = "".join(f"st.global.b32 [%d2+{4 * i}], {x};" for i, x in enumerate(names[na + nb : -1]))
            code = (
                ".reg .b32 %m<20>; mov.u32 %r1, %tid.x; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [out];"
                f"mad.wide.u32 %d1, %r1, {4 * len(names)}, %d1; mad.wide.u32 %d2, %r1, {4 * nc}, %d2; {loads}"
                f"mma.{head}.sync.aligned.m16n8k{depth}.row.col.{types}.{out} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]}, {names[-1]}, {selector}; {stores}"
            )
            text = entry(".param .u64 a, .param .u64 out", code)
            data = [given, np.zeros((32, nc), "u4")]
            yield _of_two_arrays(f"mma.{head} k{depth} {types} {selector}", text, data)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    rng = np.random.default_rng(12)
    yield from _products(rng)
    yield from _fragments()
    yield from _sparse(rng)
