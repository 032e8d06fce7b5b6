"""The arrays of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.device import Device
from .cases import TopkCase

Array = npt.NDArray[Any]
POOL = 256  # rows that are drawn; the others repeat them in random order
HOT_DIGITS, DIGIT_STEP, DIGIT_SHIFT = 32, 64, 21  # a digit is the upper 11 bits; 64 apart lie in one bank


@dataclass(frozen=True)
class TopkInputs:
    """One set of inputs, on the device and in NumPy."""

    logits: Any
    host: Array


@dataclass(frozen=True)
class Selection:
    """Results of a call; `lowest_ties` if equal logits are selected by their index."""

    indices: Any
    lowest_ties: bool


def make_inputs(case: TopkCase, dtype: str, seed: int, device: Device) -> TopkInputs:
    """float32 logits. `dtype` is the bench's: these have their own."""
    rng = np.random.default_rng(seed)
    shape = min(POOL, case.s_q), case.s_kv
    pool = _hot(rng, *shape) if case.hot else rng.standard_normal(shape, np.float32)
    host = pool[rng.permutation(case.s_q) % len(pool)]
    return TopkInputs(device.upload(host), host)


def _hot(rng: np.random.Generator, *shape: int) -> Array:
    """Random lower bits under one of a few upper digits; all of these are finite."""
    digits = rng.integers(0, HOT_DIGITS, shape, np.uint32) * np.uint32(DIGIT_STEP)
    bits = digits << np.uint32(DIGIT_SHIFT) | rng.integers(0, 1 << DIGIT_SHIFT, shape, np.uint32)
    made: Array = bits.view(np.float32)
    return made
