"""Probes of the sparse forward and sparse decode against the oracle: small calls, then of real sizes.

Of the kernels for Blackwell, and of those with mma.sync.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.kernels.attention import mma
from mla_cupy.kernels.attention.kernel import AttentionKernel
from mla_cupy.kernels.sparse_decode import records
from mla_cupy.kernels.sparse_forward import sm100
from mla_cupy.selftest.calls import D_QK, SCALE
from mla_cupy.selftest.mma_calls import PAGE_SIZE, MmaProbe, Problem, Sizes, random_records
from mla_cupy.selftest.probe import random

S_KV = 90
_INSTRUCTIONS = ("tmem/*", "mma/*", "copy/*", "stmatrix/*")
_OF_A_PAIR = ("tmem/*", "mma.pair/*", "copy/*")


@functools.lru_cache(maxsize=2)
def _forward(sizes: Sizes, heads: int, dtype: str) -> Problem:
    """Queries that select `keys` rows each: some are no rows, some come twice."""
    rng, kind = random(f"sparse forward {sizes} {heads} {dtype}"), dtypes.numpy_dtype(dtype)
    s_kv = max(S_KV, 4 * sizes.keys)
    indices = rng.integers(0, s_kv, (sizes.queries, sizes.keys)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.05] = -1
    arguments: dict[str, Any] = {
        "q": rng.standard_normal((sizes.queries, heads, D_QK), np.float32).astype(kind),
        "kv": rng.standard_normal((s_kv, D_QK), np.float32).astype(kind),
        "indices": indices,
    }
    return Problem(arguments, reference.sparse_mla_forward(**arguments, scale=SCALE)[0])


@functools.lru_cache(maxsize=2)
def _decode(sizes: Sizes, heads: int, dtype: str) -> Problem:
    """Queries of FP8 records: "v32" for bfloat16, "v4" for float16."""
    rng, kind = random(f"sparse decode {sizes} {heads} {dtype}"), dtypes.numpy_dtype(dtype)
    record = FORMATS["v32" if dtype == "bfloat16" else "v4"]
    cache = random_records(rng, record.name, -(-max(S_KV, 4 * sizes.keys) // PAGE_SIZE), kind)
    room = len(cache) * PAGE_SIZE
    indices = rng.integers(0, room, (sizes.queries, 1, sizes.keys)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.05] = -1
    q = rng.standard_normal((sizes.queries, 1, heads, record.d_qk), np.float32).astype(kind)
    arguments: dict[str, Any] = {"q": q, "kv_cache": cache, "indices": indices}
    return Problem(arguments, reference.sparse_mla_decode(**arguments, scale=SCALE)[0])


def _probes_of(
    kernel: AttentionKernel[Any], call: str, heads: tuple[int, ...], needs: tuple[str, ...] = _INSTRUCTIONS
) -> Iterator[MmaProbe]:
    problem = _decode if call == "sparse_mla_decode" else _forward
    for h_q in heads:
        for stage, dtype, on_gpu, simulated in (
            ("block", "bfloat16", Sizes(1, 140), Sizes(1, 140)),
            ("block", "float16", Sizes(1, 140), Sizes(1, 70)),
            ("kernel", "bfloat16", Sizes(64, 2048), Sizes(2, 70)),
        ):
            yield MmaProbe(
                f"{stage}/{kernel.name}/{dtype}-{h_q}heads",
                f"{call}, {h_q} heads, {on_gpu.queries} queries of {on_gpu.keys} slots, against the oracle",
                kernel.name,
                functools.partial(getattr(mla_cupy, call), scale=SCALE),
                functools.partial(problem, heads=h_q, dtype=dtype),
                on_gpu,
                simulated,
                kernel.archs,
                (f"block/{kernel.name}/*",) if stage == "kernel" else needs,
            )


def probes() -> list[MmaProbe]:
    """Probes of every kernel, with the heads of each of its builds."""
    return [
        *_probes_of(sm100.KERNEL, "sparse_mla_forward", sm100.BLOCK_HEADS),
        *_probes_of(sm100.JOINT, "sparse_mla_forward", (128,), _OF_A_PAIR),
        *_probes_of(records.SM100, "sparse_mla_decode", records.BLACKWELL_BLOCK_ROWS),
        *_probes_of(mma.WIDE, "sparse_mla_forward", (64,), ()),
        *_probes_of(records.MMA, "sparse_mla_decode", mma.SMALL_ROWS, ()),
    ]
