"""The base of a log-sum-exp, and which ones have weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.errors import ArgumentError, explain

#: In base 2. From here on float32 rounds it to whole numbers and more: exp(score - lse) could be anything.
HUGE_LSE2 = 2.0**24

_LOG_OF_BASE = {"e": 1.0, "2": math.log(2.0)}


def log_of_base(lse_base: str) -> float:
    """Divisor that makes a natural logarithm one of base `lse_base`."""
    if lse_base not in _LOG_OF_BASE:
        raise ArgumentError(explain("lse_base", repr(lse_base), '"e" or "2"'))
    return _LOG_OF_BASE[lse_base]


def has_no_weights(natural: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """True for a row without gradients: its natural log-sum-exp is infinite, or huge."""
    return np.asarray(np.abs(natural) / math.log(2.0) >= HUGE_LSE2)
