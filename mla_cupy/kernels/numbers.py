"""Factors between the natural logarithms of the public calls and the binary ones of the kernels."""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)


def from_log2(lse_base: str) -> float:
    """What a binary logarithm is multiplied by to be one of base "e" or "2"."""
    return math.log(2) if lse_base == "e" else 1.0


def to_log2(lse_base: str) -> float:
    """What a logarithm of base "e" or "2" is multiplied by to be a binary one."""
    return LOG2_E if lse_base == "e" else 1.0
