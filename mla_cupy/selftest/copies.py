"""Probes of TMA: gather4, and boxes of heads, into and out of slabs in the 128-byte swizzle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from mla_cupy.launchers.spec import KernelSpec, Params, Variant
from mla_cupy.selftest.layouts import SLAB_COLUMNS, by_rows, slab_elements
from mla_cupy.selftest.probe import ARCHS, BLACKWELL, Array, BoxMap, Case, InstructionProbe, random

ROWS = 64
DIMS = 576
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class CopyVariant(Variant):
    """`copy` is "gather", "load" or "store"."""

    copy: str


PARAMS = Params(rows="u8", slab_in="u8", slab_out="u8", gathers="i4", c0="i4", c1="i4", c2="i4")

SPEC = KernelSpec(
    "probe_copy_sm100",
    "sm100/probe_copy.cu",
    variants=tuple(map(CopyVariant, ("gather", "load", "store"))),
    core=(),
    supports_arch=ARCHS.__contains__,
    params=PARAMS,
)

S_KV = 101
_OUTSIDE = (-1, S_KV, INT_MAX, INT_MIN)

#: (rows in the slab, first column, numbers that are mixed into the rows, elements between rows, dtype)
GATHERS: dict[str, tuple[int, int, tuple[int, ...], int, str]] = {
    "32rows": (32, 0, (), 576, "bfloat16"),
    "32rows-outside": (32, 64, _OUTSIDE, 576, "bfloat16"),
    "32rows-rope": (32, 512, (S_KV - 1, 0), 640, "bfloat16"),
    "64rows-outside": (64, 448, _OUTSIDE, 584, "float16"),
    "4rows-none": (4, 128, (-1, -1, -1, -1), 576, "bfloat16"),
}

#: (heads, queries, (column, head, query) of the box)
BOXES: dict[str, tuple[int, int, tuple[int, int, int]]] = {
    "64heads": (64, 2, (128, 0, 1)),
    "100heads-outside": (100, 3, (512, 64, 1)),
    "16heads-outside": (16, 2, (0, 0, 1)),
}


def _slab(rng: np.random.Generator) -> Array:
    return rng.integers(0, 2**16, ROWS * SLAB_COLUMNS, np.uint16)


def _gather_case(name: str, rows: int, column: int, mixed: tuple[int, ...], stride: int, dtype: str) -> Case:
    rng = random(name)
    kv = rng.integers(0, 2**16, (S_KV, stride), np.uint16)
    numbers = rng.integers(0, S_KV, rows)
    numbers[rng.permutation(rows)[: len(mixed)]] = mixed
    slab = _slab(rng)
    after = slab.copy()
    inside = (numbers >= 0) & (numbers < S_KV)
    picked = kv[np.where(inside, numbers, 0), column : column + SLAB_COLUMNS] * inside[:, None].astype(np.uint16)
    after[slab_elements(rows)] = picked
    return Case(
        {"kv": kv, "rows": numbers.astype(np.int32), "before": slab, "slab": np.zeros_like(by_rows(slab))},
        ("rows", "before", "slab", rows // 4, column, 0, 0),
        {"slab": by_rows(after)},
        box_map=BoxMap("kv", dtype, (DIMS, S_KV), (stride,), (SLAB_COLUMNS, 1)),
    )


def _box_case(name: str, copy: str, heads: int, queries: int, at: tuple[int, int, int]) -> Case:
    rng = random(name)
    q = rng.integers(0, 2**16, (queries, heads, DIMS), np.uint16)
    column, head, query = at
    slab, elements = _slab(rng), slab_elements(ROWS)
    box = (query, slice(head, head + ROWS), slice(column, column + SLAB_COLUMNS))
    there = q[box].shape[0]  # heads that exist
    after_q, after_slab = q.copy(), slab.copy()
    if copy == "load":
        after_slab[elements] = 0
        after_slab[elements[:there]] = q[box]
    else:
        after_q[box] = slab[elements[:there]]
    return Case(
        {"q": q, "before": slab, "slab": np.zeros_like(by_rows(slab))},
        (0, "before", "slab", 0, *at),
        {"q": after_q, "slab": by_rows(after_slab)},
        box_map=BoxMap("q", "bfloat16", (DIMS, heads, queries), (DIMS, DIMS * heads), (SLAB_COLUMNS, ROWS, 1)),
    )


def _gather(label: str) -> InstructionProbe:
    name = f"copy/gather4/{label}"
    rows, column, mixed, stride, dtype = GATHERS[label]
    outside = ", some outside of the tensor" if mixed else ""
    about = f"{rows // 4} gather4 of 4 rows x 128 bytes, columns {column} to {column + 63}{outside}, 512 bytes apart"
    case = partial(_gather_case, name, rows, column, mixed, stride, dtype)
    return InstructionProbe(name, about, SPEC, CopyVariant("gather"), case, BLACKWELL)


def _box(copy: str, label: str) -> InstructionProbe:
    name = f"copy/{copy}/{label}"
    heads, queries, at = BOXES[label]
    about = f"3-D {copy} of a box of 64 columns x 64 heads of one query at {at}, where there are {heads} heads"
    case = partial(_box_case, name, copy, heads, queries, at)
    return InstructionProbe(name, about, SPEC, CopyVariant(copy), case, ARCHS)


PROBES = (
    *(_gather(label) for label in GATHERS),
    *(_box(copy, label) for copy in ("load", "store") for label in BOXES),
)
