"""The base of a log-sum-exp."""

from __future__ import annotations

import math

from mla_cupy.errors import ArgumentError, explain

_LOG_OF_BASE = {"e": 1.0, "2": math.log(2.0)}


def log_of_base(lse_base: str) -> float:
    """Divisor that makes a natural logarithm one of base `lse_base`."""
    if lse_base not in _LOG_OF_BASE:
        raise ArgumentError(explain("lse_base", repr(lse_base), '"e" or "2"'))
    return _LOG_OF_BASE[lse_base]
