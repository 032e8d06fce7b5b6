"""The arrays of a case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...core.device import Device
from .cases import PAGE_SIZE, LogitsCase

Array = npt.NDArray[Any]
POOL = 8192  # rows of codes that are drawn; the others repeat them in random order
SCALE_BYTES = 4


@dataclass(frozen=True)
class LogitsInputs:
    """One set of inputs: the arguments of the public call by name, on the device and in NumPy."""

    arguments: dict[str, Any]
    host: dict[str, Array]


@dataclass(frozen=True)
class LogitsOutputs:
    """Results of a call, -inf where a query does not see a key; and the part of it that every query sees."""

    logits: Any
    shared: Any


def outputs_of(case: LogitsCase, logits: Any) -> LogitsOutputs:
    """The result with its finite part."""
    return LogitsOutputs(logits, logits[..., : case.keys_of_first])


def make_inputs(case: LogitsCase, dtype: str, seed: int, device: Device) -> LogitsInputs:
    """Normal queries, keys and weights; scales from 0.5 to 2. `dtype` is the bench's: cases name their own."""
    rng = np.random.default_rng(seed)
    host = _paged(case, rng) if case.b else _prefill(case, rng)
    return LogitsInputs({name: device.upload(x) for name, x in host.items()}, host)


def codes(rng: np.random.Generator, *shape: int) -> Array:
    """Rows of e4m3 codes of normal numbers."""
    count = min(POOL, math.prod(shape[:-1]))
    pool = rng.standard_normal((count, shape[-1]), np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rows: Array = pool[rng.integers(0, count, shape[:-1])]
    return rows


def _weights(rng: np.random.Generator, *shape: int) -> Array:
    made: Array = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return made


def _prefill(case: LogitsCase, rng: np.random.Generator) -> dict[str, Array]:
    ends = np.full(case.s_q, case.s_kv) if case.full else np.arange(case.s_q) + case.s_kv - case.s_q + 1
    arrays = {
        "weights": _weights(rng, case.s_q, case.h),
        "ks": np.zeros(case.s_q, np.int32),
        "ke": np.maximum(ends, 0).astype(np.int32),
    }
    if case.bf16:
        shapes = {"q": (case.s_q, case.h, case.d), "k": (case.s_kv, case.d)}
        return arrays | {
            name: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
        }
    scales = rng.uniform(0.5, 2.0, case.s_kv).astype(np.float32)
    return arrays | {
        "q": codes(rng, case.s_q, case.h, case.d),
        "k": codes(rng, case.s_kv, case.d),
        "k_scale": scales,
    }


def _paged(case: LogitsCase, rng: np.random.Generator) -> dict[str, Array]:
    pages = case.num_keys // PAGE_SIZE
    code_bytes = case.key_bytes - SCALE_BYTES
    cache = np.empty((case.b * pages, PAGE_SIZE * case.key_bytes), np.uint8)
    codes_of, scales = cache[:, : PAGE_SIZE * code_bytes], cache[:, PAGE_SIZE * code_bytes :]
    codes_of[...] = codes(rng, case.b * pages, PAGE_SIZE, code_bytes).reshape(len(cache), -1)
    if case.e2m1:  # any byte is two codes; exponents are those of 1/4 to 2
        scales[...] = rng.integers(125, 129, scales.shape, np.uint8)
    else:
        scales.view(np.float32)[...] = rng.uniform(0.5, 2.0, (len(cache), PAGE_SIZE))
    return {
        "q": codes(rng, case.b, case.s_q, case.h, case.d),
        "cache": cache.reshape(-1, PAGE_SIZE, 1, case.key_bytes),
        "weights": _weights(rng, case.b, case.s_q, case.h),
        "seqlens": np.full(case.b, case.s_kv, np.int32),
        "block_table": rng.permutation(case.b * pages).reshape(case.b, pages).astype(np.int32),
    }
