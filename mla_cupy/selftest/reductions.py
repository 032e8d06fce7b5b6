"""Probes of additions to global memory, and of the transposed stores that P and dS go through."""

from __future__ import annotations

from functools import partial

import numpy as np

from mla_cupy import dtypes
from mla_cupy.kernels.spec import KernelSpec, Variant, variants
from mla_cupy.selftest.layouts import SW128_COLUMNS, by_rows, sw_tile_elements
from mla_cupy.selftest.params import ProbeReduceParams, ProbeStmatrixParams
from mla_cupy.selftest.probe import TMA_ARCHS, Case, InstructionProbe, random, small_integers

THREADS = 128
BLOCKS = 4
HEADS = 64


REDUCE: KernelSpec[object] = KernelSpec(
    "probes_reduce",
    "reductions into global memory",
    "probes/reduce.cu",
    ProbeReduceParams,
    TMA_ARCHS,
    variants=variants(width=(4, 2, 1)),
)

STMATRIX: KernelSpec[object] = KernelSpec(
    "probes_stmatrix",
    "transposed stores of matrices",
    "probes/stmatrix.cu",
    ProbeStmatrixParams,
    TMA_ARCHS,
    variants=variants(dtype=("bfloat16", "float16"), keys=(32, 64)),
)


def _reduce_case(name: str, width: int, groups: int) -> Case:
    rng = random(name)
    threads = BLOCKS * THREADS
    values = small_integers(rng, threads, width, most=100)
    wanted = (rng.random(threads) < 0.7).astype(np.int32)
    before = small_integers(rng, groups, width, most=1000)
    after = before.copy()
    np.add.at(after, np.arange(threads) % groups, values * wanted[:, None])
    kind = np.int32 if width == 1 else np.float32
    return Case(
        {"values": values, "wanted": wanted, "sums": before.astype(kind)},
        ProbeReduceParams(values="values", wanted="wanted", sums="sums", groups=groups),
        {"sums": after.astype(kind)},
        grid=(BLOCKS, 1, 1),
    )


def _stmatrix_case(name: str, dtype: str, keys: int) -> Case:
    rng = random(name)
    scores = small_integers(rng, HEADS, keys, most=127)
    sw_tile = rng.integers(0, 2**16, HEADS * SW128_COLUMNS, np.uint16)
    after = sw_tile.copy()
    after[sw_tile_elements(keys)] = np.ascontiguousarray(scores.T).astype(dtypes.numpy_dtype(dtype)).view(np.uint16)
    return Case(
        {"scores": scores, "before": sw_tile, "sw_tile": np.zeros_like(by_rows(sw_tile))},
        ProbeStmatrixParams(scores="scores", in_="before", out="sw_tile"),
        {"sw_tile": by_rows(after)},
    )


def _reduce(width: int, groups: int) -> InstructionProbe:
    kind = "s32" if width == 1 else f"v{width}.f32"
    name = f"reduce/{kind}-{groups}groups"
    about = f"red.global.add.{kind} by {BLOCKS} blocks of {THREADS} threads to {groups} places"
    variant = Variant(width=width)
    return InstructionProbe(name, about, REDUCE, variant, partial(_reduce_case, name, width, groups), TMA_ARCHS)


def _stmatrix(dtype: str, keys: int) -> InstructionProbe:
    name = f"stmatrix/{dtype}-{keys}keys"
    about = f"stmatrix.x4.trans of fragments of 64 heads x {keys} keys to a sw_tile with a row for each key"
    variant = Variant(dtype=dtype, keys=keys)
    return InstructionProbe(name, about, STMATRIX, variant, partial(_stmatrix_case, name, dtype, keys), TMA_ARCHS)


PROBES = (
    *(_reduce(width, groups) for width in (4, 2, 1) for groups in (1, 24)),
    *(_stmatrix(dtype, keys) for dtype in ("bfloat16", "float16") for keys in (32, 64)),
)
