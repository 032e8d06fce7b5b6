"""Probes of Blackwell's sparse forward: the public call against the oracle, first one block, then real sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.sparse_forward import sm100
from mla_cupy.kernels.sparse_forward.problem import MappedKernel
from mla_cupy.selftest.calls import D_QK
from mla_cupy.selftest.mma_calls import MmaProbe, Problem, Sizes
from mla_cupy.selftest.probe import random

S_KV = 90
_INSTRUCTIONS = ("tmem/*", "mma/*", "copy/*", "stmatrix/*")


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
    return Problem(arguments, reference.sparse_mla_forward(**arguments)[0])


def _probes_of(kernel: MappedKernel, heads: tuple[int, ...]) -> Iterator[MmaProbe]:
    for h_q in heads:
        for stage, dtype, on_gpu, simulated in (
            ("block", "bfloat16", Sizes(1, 140), Sizes(1, 140)),
            ("block", "float16", Sizes(1, 140), Sizes(1, 70)),
            ("kernel", "bfloat16", Sizes(64, 2048), Sizes(2, 70)),
        ):
            yield MmaProbe(
                f"{stage}/{kernel.name}/{dtype}-{h_q}heads",
                f"sparse_mla_forward, {h_q} heads, {on_gpu.queries} queries of {on_gpu.keys} slots, against the oracle",
                kernel.name,
                mla_cupy.sparse_mla_forward,
                functools.partial(_forward, heads=h_q, dtype=dtype),
                on_gpu,
                simulated,
                kernel.archs,
                (f"block/{kernel.name}/*",) if stage == "kernel" else _INSTRUCTIONS,
            )


def probes() -> list[MmaProbe]:
    """Probes of every kernel, with the heads of each of its builds."""
    return [*_probes_of(sm100.KERNEL, sm100.BLOCK_HEADS), *_probes_of(sm100.PAIR, (128,))]
