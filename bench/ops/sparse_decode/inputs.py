"""The arrays of a case. Its input sets share the caches, which are large, and differ in queries and indices."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import numpy_dtype

from ...core.device import Device
from .cases import PAGE_SIZE, SparseDecodeCase

Array = npt.NDArray[Any]
DRAWN_PAGES = 64  # pages of records that are drawn; a pool repeats them in random order


@dataclass(frozen=True)
class Source:
    """A cache and the slots that each query selects from it, on the device; and the slots in NumPy."""

    cache: Any  # (num_pages, 64, bytes of a token) uint8
    indices: Any  # (b, s_q, topk) int32
    host_indices: Array


@dataclass(frozen=True)
class SparseDecodeInputs:
    """One set of inputs: one source, or two; a sink, or none."""

    q: Any  # (b, s_q, h_q, d_qk)
    sources: tuple[Source, ...]
    sink: Any = None  # (h_q,) float32


@dataclass(frozen=True)
class SparseDecodeOutputs:
    """Results of a call; lse in natural units."""

    out: Any  # (b s_q, h_q, 512)
    lse: Any  # (b s_q, h_q)


_POOLS: WeakKeyDictionary[Any, dict[tuple[str, int, int], Any]] = WeakKeyDictionary()


def make_inputs(case: SparseDecodeCase, dtype: str, seed: int, device: Device) -> SparseDecodeInputs:
    """Normal queries and latents, scales that are powers of two; slots uniformly from the pool."""
    rng = np.random.default_rng(seed)
    sources = []
    for number, (topk, record) in enumerate(((case.topk, case.record), (case.extra, case.extra_record))):
        if topk:
            indices = rng.integers(0, case.pool, (case.b, case.s_q, topk), np.int32)
            sources.append(Source(_pool(case, record, number, device), device.upload(indices), indices))
    q = device.normal((case.b, case.s_q, case.h_q, case.d_qk), dtype, seed + 1)
    sink = device.upload(rng.standard_normal(case.h_q, np.float32)) if case.has_sink else None
    return SparseDecodeInputs(q, tuple(sources), sink)


def _pool(case: SparseDecodeCase, record: str, number: int, device: Device) -> Any:
    """Pools on the device: kept until another case needs others."""
    held = _POOLS.setdefault(device, {})
    for other in [key for key in held if key[0] not in (case.record, case.extra_record) or key[1] != case.pool]:
        del held[other]
    key = (record, case.pool, number)
    if key not in held:
        rows = device.upload(host_pages(*key))
        tokens = rows[:, : PAGE_SIZE * FORMATS[record].token_bytes]
        held[key] = tokens.reshape(len(rows), PAGE_SIZE, FORMATS[record].token_bytes)
    return held[key]


@functools.lru_cache(maxsize=2)
def host_pages(record: str, tokens: int, seed: int) -> Array:
    """A pool's pages in NumPy: rows of the stride that the record's convention wants."""
    drawn = _drawn(record, seed)
    chosen: Array = drawn[np.random.default_rng(seed).integers(0, len(drawn), tokens // PAGE_SIZE)]
    return chosen


def host_cache(record: str, rows: Array) -> Array:
    """Cache as an array of tokens."""
    nbytes = FORMATS[record].token_bytes
    return rows[:, : PAGE_SIZE * nbytes].reshape(len(rows), PAGE_SIZE, nbytes)


def _drawn(record: str, seed: int) -> Array:
    layout, rng = FORMATS[record], np.random.default_rng(seed)
    count = DRAWN_PAGES * PAGE_SIZE
    rows = np.zeros((DRAWN_PAGES, layout.page_bytes(PAGE_SIZE)), np.uint8)
    shapes = (count, layout.d_latent), (count, layout.d_rope)
    latent, rope = (rng.standard_normal(shape, np.float32).astype(numpy_dtype("bfloat16")) for shape in shapes)
    reference.cache_append(latent, rope, host_cache(record, rows), np.arange(count))
    return rows
