"""Probes of a pair of blocks: products by `cta_group::2`, and gathers counted by the first block."""

from __future__ import annotations

from functools import partial

import numpy as np

from mla_cupy import dtypes
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.selftest.layouts import LANES, pair_sum_cells
from mla_cupy.selftest.params import ProbePairParams
from mla_cupy.selftest.probe import BLACKWELL, Array, BoxMap, Case, InstructionProbe, random, small_integers
from mla_cupy.selftest.tmem import LAST_WINDOW, known_cells

BLOCKS = 2
M, K = 128, 64
"""Rows of both blocks, and depth."""
S_KV, COLUMNS = 150, 256
BOX_COLUMNS = 64

KERNEL: KernelSpec[object] = KernelSpec(
    "probes_pair",
    "products of a pair of blocks",
    "probes/pair.cu",
    ProbePairParams,
    BLACKWELL,
    variants=variants(dtype=("bfloat16", "float16")),
)

#: N, whether B is N-major, the first column of the window.
PRODUCTS: dict[str, tuple[int, bool, int]] = {"scores-n128": (128, False, 0), "values-n256": (256, True, LAST_WINDOW)}


def _case(name: str, dtype: str, n: int, n_major: bool, window: int, added: bool) -> Case:
    rng, kind = random(name), dtypes.numpy_dtype(dtype)
    a, kv = small_integers(rng, M, K), small_integers(rng, S_KV, COLUMNS)
    rows = rng.integers(0, S_KV, K if n_major else n)
    rows[rng.permutation(len(rows))[:2]] = -1, S_KV  # outside: zeros
    inside = (rows >= 0) & (rows < S_KV)
    gathered = kv[np.where(inside, rows, 0)] * inside[:, None]
    product = a @ (gathered[:, :n] if n_major else gathered[:, :K].T)
    cells = known_cells()
    dump = np.stack([cells] * BLOCKS)
    at = pair_sum_cells(n)
    for block in range(BLOCKS):
        place = block, at.lanes, at.columns
        own = product[block * M // BLOCKS : (block + 1) * M // BLOCKS]
        dump[place] = own + (dump[place] if added else 0)
    arrays: dict[str, Array] = {
        "a": a.astype(kind).view(np.uint16),
        "kv": kv.astype(kind).view(np.uint16),
        "rows": rows.astype(np.int32),
        "cells": cells,
        "dumps": np.full((BLOCKS, LANES, cells.shape[1]), np.nan, np.float32),
    }
    return Case(
        arrays,
        ProbePairParams(a="a", rows="rows", cells="cells", dump="dumps", n=n, accumulate=added, window=window),
        {"dumps": dump},
        grid=(BLOCKS, 1, 1),
        box_map=BoxMap("kv", dtype, (COLUMNS, S_KV), (COLUMNS,), (BOX_COLUMNS, 1)),
    )


def _probe(label: str, dtype: str, added: bool) -> InstructionProbe:
    n, n_major, window = PRODUCTS[label]
    name = f"mma.pair/{dtype}/{label}{'-added' if added else ''}"
    about = f"tcgen05.mma of a pair: M {M} N {n} K {K}, A K-major, B {'MN' if n_major else 'K'}-major"
    about += ", accumulated" if added else ""
    case = partial(_case, name, dtype, n, n_major, window, added)
    needs = ("tmem/*/32x32b.x32-*", "copy/gather4/*")
    return InstructionProbe(name, about, KERNEL, Variant(dtype=dtype), case, needs=needs)


PROBES = tuple(
    _probe(label, dtype, added) for dtype in ("bfloat16", "float16") for label in PRODUCTS for added in (False, True)
)
