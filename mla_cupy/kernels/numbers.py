"""Factors between the natural logarithms of the public calls and the binary ones of the kernels."""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)


def to_log2(lse_base: str) -> float:
    """Factor from a logarithm of base "e" or "2" to one of base 2."""
    return LOG2_E if lse_base == "e" else 1.0
