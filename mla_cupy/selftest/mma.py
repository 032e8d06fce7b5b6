"""Probes of tcgen05.mma: each shape, pair of majors and place of the sum that the kernels use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mla_cupy import dtypes
from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.selftest import params
from mla_cupy.selftest.layouts import sum_cells
from mla_cupy.selftest.params import ProbeMmaParams
from mla_cupy.selftest.probe import BLACKWELL, Array, Case, InstructionProbe, random, small_integers
from mla_cupy.selftest.tmem import LAST_WINDOW, known_cells

STEP_BYTES = 32
"""Bytes of each row of operands per product."""
E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Product:
    """D[m, n] (+)= A[m, k] B[n, k]^T, k = 16 steps, or 32 of e4m3; an operand is K-major, or MN-major."""

    m: int
    n: int
    a_mn: bool = False
    b_mn: bool = False
    lane: int = 0
    column: int = 0
    steps: int = 4
    accumulate: bool = False
    element_bytes: int = 2

    @property
    def k(self) -> int:
        """Depth."""
        return STEP_BYTES // self.element_bytes * self.steps

    def parameters(self) -> params.Product:
        """Parameters in the kernel's form."""
        return params.Product(
            m=self.m,
            n=self.n,
            a_mn_major=self.a_mn,
            b_mn_major=self.b_mn,
            lane=self.lane,
            column=self.column,
            steps=self.steps,
            accumulate=self.accumulate,
        )

    def __str__(self) -> str:
        majors = "MN" if self.a_mn else "K", "MN" if self.b_mn else "K"
        text = f"M {self.m} N {self.n} K {self.k}, A {majors[0]}-major, B {majors[1]}-major, lane {self.lane}"
        return text + (", accumulated" if self.accumulate else "")


KERNEL: KernelSpec[object] = KernelSpec(
    "probes_mma",
    "products of tcgen05",
    "probes/mma.cu",
    ProbeMmaParams,
    BLACKWELL,
    variants=(
        *variants(dtype=("bfloat16", "float16"), weight_stationary=(0, 1)),
        Variant(dtype=E4M3, weight_stationary=0),
    ),
)

K, MN = False, True

#: Tiles of 32 keys, as the backward multiplies them with 64 heads, and of 64. Steps over heads are 4, over keys 2 or 4.
SINGLE: dict[str, Product] = {
    "s-m64n32": Product(64, 32, K, K),
    "s-m64n64": Product(64, 64, K, K),
    "dp-m64n32": Product(64, 32, K, K, lane=16),
    "dp-m64n64": Product(64, 64, K, K, lane=16),
    "dkv-m128n32": Product(128, 32, MN, K),
    "dkv-m128n64": Product(128, 64, MN, K, column=64),
    "dkv-rope-m64n32": Product(64, 32, MN, K, lane=16),
    "dkv-rope-m64n64": Product(64, 64, MN, K, lane=16, column=64),
    "dq-m128n64-32keys": Product(128, 64, MN, MN, steps=2),
    "dq-m128n64-64keys": Product(128, 64, MN, MN, column=64),
    "dq-rope-m64n64-32keys": Product(64, 64, MN, MN, steps=2, column=64),
    "dq-rope-m64n64-64keys": Product(64, 64, MN, MN),
}

#: Numbers of rows of the forwards that the backward has no sums of: scores in both halves of the lanes, values.
ROWS: dict[str, Product] = {
    "scores-m64n16": Product(64, 16, K, K),
    "scores-m64n16-upper": Product(64, 16, K, K, lane=16),
    "scores-m64n48": Product(64, 48, K, K),
    "scores-m64n48-upper": Product(64, 48, K, K, lane=16),
    "values-m128n16": Product(128, 16, MN, K, column=16),
    "values-m128n48": Product(128, 48, MN, K, column=48),
}

#: One instruction, and a second sw_tile of columns.
DEPTHS: dict[str, Product] = {
    **{
        f"{name}-1step": replace(SINGLE[name], steps=1)
        for name in ("s-m64n32", "dp-m64n64", "dkv-m128n32", "dkv-rope-m64n32", "dq-m128n64-32keys")
    },
    "s-m64n64-2slabs": Product(64, 64, K, K, steps=8),
    "dp-m64n32-2slabs": Product(64, 32, K, K, lane=16, steps=8),
}

#: Two products without a wait in between: sums in the two halves of the lanes, and one sum made twice.
PAIRS: dict[str, tuple[Product, Product]] = {
    "s-and-dp-n32": (SINGLE["s-m64n32"], SINGLE["dp-m64n32"]),
    "s-and-dp-n64": (SINGLE["s-m64n64"], SINGLE["dp-m64n64"]),
    "ropes-n32": (SINGLE["dq-rope-m64n64-32keys"], replace(SINGLE["dkv-rope-m64n32"], column=64)),
    "ropes-n64": (SINGLE["dq-rope-m64n64-64keys"], replace(SINGLE["dkv-rope-m64n64"], column=0)),
    "dv-then-dk": (SINGLE["dkv-m128n32"], replace(SINGLE["dkv-m128n32"], accumulate=True)),
}

#: Realisation with tiles of 32 keys, transposed scores, sums in parts.
WEIGHT_STATIONARY: dict[str, Product] = {
    "s-m32n64": Product(32, 64, K, K),
    "s-m32n64-2slabs": Product(32, 64, K, K, steps=8, column=16),
    "dkv-m32n256": Product(32, 256, K, MN),
    "dkv-rope-m32n64": Product(32, 64, K, MN, column=64),
    "dq-m64n256": Product(64, 256, MN, MN, steps=2),
    "dq-rope-m64n64": Product(64, 64, MN, MN, steps=2, column=96),
    "m64n64": Product(64, 64, K, K),
    "m64n256": Product(64, 256, K, MN),
}

#: The indexer's logits: 128 keys, a chunk of the columns of queries, rows of 128, 64 and 32 codes.
CODES: dict[str, Product] = {
    "m128n128": Product(128, 128, K, K, element_bytes=1),
    "m128n16": Product(128, 16, K, K, element_bytes=1),
    "m128n48": Product(128, 48, K, K, column=48, element_bytes=1),
    "m128n112": Product(128, 112, K, K, element_bytes=1),
    "m128n64-64codes": Product(128, 64, K, K, column=64, steps=2, element_bytes=1),
    "m128n128-32codes": Product(128, 128, K, K, steps=1, element_bytes=1),
}


def _bits(x: Array, dtype: str) -> Array:
    """Bit patterns, which need no library with that type."""
    return np.ascontiguousarray(x).astype(dtypes.numpy_dtype(dtype)).view(np.uint8 if dtype == E4M3 else np.uint16)


def _case(name: str, variant: Variant, products: tuple[Product, ...], window: int) -> Case:
    rng = random(name)
    dump = known_cells()
    arrays = {"cells": dump.copy(), "dump": np.full_like(dump, np.nan)}
    for i, product in enumerate(products):
        a, b = small_integers(rng, product.m, product.k), small_integers(rng, product.n, product.k)
        arrays[f"a{i}"] = _bits(a.T if product.a_mn else a, variant.dtype)
        arrays[f"b{i}"] = _bits(b.T if product.b_mn else b, variant.dtype)
        at = sum_cells(product.m, product.n, bool(variant.weight_stationary))
        place = at.lanes + product.lane, at.columns + product.column
        dump[place] = a @ b.T + (dump[place] if product.accumulate else 0)
    first, second = products[0], products[-1]  # of one product the kernel does not read the second
    a0, a1, b0, b1 = (x if x in arrays else NULL for x in ("a0", "a1", "b0", "b1"))
    parameters = ProbeMmaParams(
        a=(a0, a1),
        b=(b0, b1),
        cells="cells",
        dump="dump",
        product=(first.parameters(), second.parameters()),
        products=len(products),
        window=window,
    )
    return Case(arrays, parameters, {"dump": dump})


def _probe(
    stage: str, name: str, dtype: str, products: tuple[Product, ...], weight_stationary: int
) -> InstructionProbe:
    full_name = f"{stage}/{dtype}/{name}"
    form = ".ws" if weight_stationary else " of e4m3" if dtype == E4M3 else ""
    about = f"tcgen05.mma{form}: " + "; then ".join(map(str, products))
    variant = Variant(dtype=dtype, weight_stationary=weight_stationary)
    window = LAST_WINDOW if "rope" in name or "32codes" in name else 0  # where the kernels have them
    case = partial(_case, full_name, variant, products, window)
    return InstructionProbe(full_name, about, KERNEL, variant, case, needs=("tmem/*/32x32b.x32-*",))


def _probes() -> Iterator[InstructionProbe]:
    for dtype in ("bfloat16", "float16"):
        for name, product in SINGLE.items():
            yield _probe("mma", name, dtype, (product,), 0)
            yield _probe("mma", f"{name}-added", dtype, (replace(product, accumulate=True),), 0)
    for name, product in ROWS.items():
        yield _probe("mma", name, "bfloat16", (product,), 0)
        yield _probe("mma", f"{name}-added", "bfloat16", (replace(product, accumulate=True),), 0)
    for name, product in DEPTHS.items():
        yield _probe("mma", name, "bfloat16", (product,), 0)
    for name, pair in PAIRS.items():
        yield _probe("mma", name, "bfloat16", pair, 0)
    for dtype in ("bfloat16", "float16"):
        for name, product in WEIGHT_STATIONARY.items():
            yield _probe("mma.ws", name, dtype, (product,), 1)
    dv = WEIGHT_STATIONARY["dkv-m32n256"]
    yield _probe("mma.ws", "dv-then-dk", "bfloat16", (dv, replace(dv, accumulate=True)), 1)
    for name in ("s-m32n64", "dkv-m32n256", "dq-m64n256"):
        added = replace(WEIGHT_STATIONARY[name], accumulate=True)
        yield _probe("mma.ws", f"{name}-added", "bfloat16", (added,), 1)
    for name, product in CODES.items():
        yield _probe("mma.f8f6f4", name, E4M3, (product,), 0)
    # Two chunks of columns in turn, and sums that the first step is added to.
    codes = CODES["m128n48"]
    yield _probe("mma.f8f6f4", "two-chunks", E4M3, (CODES["m128n16"], codes), 0)
    yield _probe("mma.f8f6f4", "m128n48-added", E4M3, (replace(codes, accumulate=True),), 0)


PROBES = tuple(_probes())
