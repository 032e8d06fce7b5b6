"""Sampling, distance and rounding units, which the checks of all operations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LSE_RELATIVE = 2.0**-13  # of max(1, |lse|): float32 scores and the hardware's exp2 and log2


@dataclass(frozen=True)
class SampledVerdict:
    """Verdict: for each output the error of the worst sample, that sample's tolerance, and the number of samples."""

    ok: bool
    reason: str
    errors: dict[str, float]
    tolerances: dict[str, float]
    samples: dict[str, int]


def epsilon(dtype: str) -> float:
    """One unit in the last place of 1, by name of a 16-bit dtype."""
    finfo: Any = ml_dtypes.finfo  # has no annotations
    return float(finfo(np.dtype(dtype)).eps)


def spaced(count: int, max_count: int = 3) -> npt.NDArray[np.int64]:
    """Indices below `count`, at most `max_count`: the first, the last, and some between."""
    return np.unique(np.linspace(0, count - 1, max_count).round().astype(np.int64))


def distance(got: Array, want: Array) -> float:
    """The largest absolute difference; NaN where there is one. Equal infinities (an empty row's lse) do not differ."""
    got = got.astype(np.float64)
    return float(np.abs(np.subtract(got, want, out=np.zeros_like(want), where=got != want)).max())
