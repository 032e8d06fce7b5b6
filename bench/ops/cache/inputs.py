"""The arrays of a case: tokens, their slots, and a pool with room for twice as many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy
from mla_cupy.cache_formats import FORMATS, CacheFormat
from mla_cupy.dtypes import numpy_dtype

from ...core.device import Device
from .cases import PAGE_SIZE, CacheCase

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CacheInputs:
    """One set of inputs. The first half of the pool has tokens, unless these are to be appended; the other is empty."""

    latent: Any  # (n, d_latent)
    rope: Any  # (n, 64)
    pool: Any  # (1, pages, page_bytes) uint8: a layer
    cache: Any  # (pages, 64, width): the same memory
    slots: Any  # (n,) int32
    pairs: Any  # (pages / 2, 2) int32
    host_slots: Array


@dataclass(frozen=True)
class CacheOutputs:
    """Results of a call: rows, or the bytes of pages."""

    written: Any


def make_inputs(case: CacheCase, dtype: str, seed: int, device: Device) -> CacheInputs:
    """Normal tokens, in the first half of the pool; each of its pages to one of the second half."""
    record, rng = FORMATS[case.record], np.random.default_rng(seed)
    half = -(-case.tokens // PAGE_SIZE)
    pool = device.empty((1, 2 * half, record.page_bytes(PAGE_SIZE)), "uint8")
    slots = _slots(rng, half, case)
    pairs = np.stack([rng.permutation(half), half + rng.permutation(half)], axis=1).astype(np.int32)
    inputs = CacheInputs(
        latent=device.normal((case.tokens, record.d_latent), dtype, 2 * seed + 1),
        rope=device.normal((case.tokens, record.d_rope), dtype, 2 * seed + 2),
        pool=pool,
        cache=as_cache(record, pool[0]),
        slots=device.upload(slots),
        pairs=device.upload(pairs),
        host_slots=slots,
    )
    if case.kind != "append":
        with device.current():
            mla_cupy.cache_append(inputs.latent, inputs.rope, inputs.cache, inputs.slots)
    return inputs


def _slots(rng: np.random.Generator, pages: int, case: CacheCase) -> Array:
    if case.scattered:
        return rng.permutation(pages * PAGE_SIZE)[: case.tokens].astype(np.int32)
    slots = rng.permutation(pages)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
    return slots.reshape(-1)[: case.tokens].astype(np.int32)


def as_cache(record: CacheFormat, pages: Any) -> Any:
    """The pages of a layer as an array of tokens: the operations take pages of any stride."""
    tokens = pages[:, : PAGE_SIZE * record.token_bytes]
    if record.dtype != "uint8":
        tokens = tokens.view(numpy_dtype(record.dtype))
    return tokens.reshape(len(pages), PAGE_SIZE, record.width)
