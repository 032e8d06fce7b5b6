"""Probes of TMA: gather4, and boxes of heads, into and out of SW128 tiles in the 128-byte swizzle."""

from __future__ import annotations

from functools import partial

import numpy as np

from mla_cupy.kernels.param_layout import NULL
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.selftest.layouts import SW128_COLUMNS, by_rows, sw_tile_elements
from mla_cupy.selftest.params import ProbeCopyParams
from mla_cupy.selftest.probe import BLACKWELL, TMA_ARCHS, Array, BoxMap, Case, InstructionProbe, random

ROWS = 64
DIMS = 576
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


KERNEL: KernelSpec[object] = KernelSpec(
    "probes_copy",
    "TMA gathers and boxes",
    "probes/copy.cu",
    ProbeCopyParams,
    TMA_ARCHS,
    variants=variants(copy=("gather", "load", "store")),
)

S_KV = 101
_OUTSIDE = (-1, S_KV, INT_MAX, INT_MIN)

#: (rows in the SW128 tile, first column, numbers that are mixed into the rows, elements between rows, dtype)
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


def _sw_tile(rng: np.random.Generator) -> Array:
    return rng.integers(0, 2**16, ROWS * SW128_COLUMNS, np.uint16)


def _gather_case(name: str, rows: int, column: int, mixed: tuple[int, ...], stride: int, dtype: str) -> Case:
    rng = random(name)
    kv = rng.integers(0, 2**16, (S_KV, stride), np.uint16)
    numbers = rng.integers(0, S_KV, rows)
    numbers[rng.permutation(rows)[: len(mixed)]] = mixed
    sw_tile = _sw_tile(rng)
    after = sw_tile.copy()
    inside = (numbers >= 0) & (numbers < S_KV)
    picked = kv[np.where(inside, numbers, 0), column : column + SW128_COLUMNS] * inside[:, None].astype(np.uint16)
    after[sw_tile_elements(rows)] = picked
    return Case(
        {
            "kv": kv,
            "rows": numbers.astype(np.int32),
            "before": sw_tile,
            "sw_tile": np.zeros_like(by_rows(sw_tile)),
        },
        ProbeCopyParams(rows="rows", in_="before", out="sw_tile", gathers=rows // 4, c0=column, c1=0, c2=0),
        {"sw_tile": by_rows(after)},
        box_map=BoxMap("kv", dtype, (DIMS, S_KV), (stride,), (SW128_COLUMNS, 1)),
    )


def _box_case(name: str, copy: str, heads: int, queries: int, at: tuple[int, int, int]) -> Case:
    rng = random(name)
    q = rng.integers(0, 2**16, (queries, heads, DIMS), np.uint16)
    column, head, query = at
    sw_tile, elements = _sw_tile(rng), sw_tile_elements(ROWS)
    box = (query, slice(head, head + ROWS), slice(column, column + SW128_COLUMNS))
    there = q[box].shape[0]  # heads that exist
    after_q, after_sw_tile = q.copy(), sw_tile.copy()
    if copy == "load":
        after_sw_tile[elements] = 0
        after_sw_tile[elements[:there]] = q[box]
    else:
        after_q[box] = sw_tile[elements[:there]]
    return Case(
        {"q": q, "before": sw_tile, "sw_tile": np.zeros_like(by_rows(sw_tile))},
        ProbeCopyParams(rows=NULL, in_="before", out="sw_tile", gathers=0, c0=column, c1=head, c2=query),
        {"q": after_q, "sw_tile": by_rows(after_sw_tile)},
        box_map=BoxMap("q", "bfloat16", (DIMS, heads, queries), (DIMS, DIMS * heads), (SW128_COLUMNS, ROWS, 1)),
    )


def _gather(label: str) -> InstructionProbe:
    name = f"copy/gather4/{label}"
    rows, column, mixed, stride, dtype = GATHERS[label]
    outside = ", some outside of the tensor" if mixed else ""
    about = f"{rows // 4} gather4 of 4 rows x 128 bytes, columns {column} to {column + 63}{outside}, 512 bytes apart"
    case = partial(_gather_case, name, rows, column, mixed, stride, dtype)
    return InstructionProbe(name, about, KERNEL, Variant(copy="gather"), case, BLACKWELL)


def _box(copy: str, label: str) -> InstructionProbe:
    name = f"copy/{copy}/{label}"
    heads, queries, at = BOXES[label]
    about = f"3-D {copy} of a box of 64 columns x 64 heads of one query at {at}, where there are {heads} heads"
    case = partial(_box_case, name, copy, heads, queries, at)
    return InstructionProbe(name, about, KERNEL, Variant(copy=copy), case, TMA_ARCHS)


PROBES = (
    *(_gather(label) for label in GATHERS),
    *(_box(copy, label) for copy in ("load", "store") for label in BOXES),
)
