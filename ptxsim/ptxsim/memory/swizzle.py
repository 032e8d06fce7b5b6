"""Swizzles of shared memory, which tensor copies apply and matrix descriptors name."""

from __future__ import annotations

import numpy as np


def swizzle(chunks: np.ndarray, span: int, atom: int = 16, base: int = 0) -> np.ndarray:
    """Apply a swizzle to 16-byte chunk numbers (addresses / 16).

    The position within a line of ``span`` bytes, in units of ``atom`` bytes, is XORed with the number of the 128-byte
    line, counted from the start of the pattern.
    """
    if not span:
        return chunks
    shift = atom // 32  # 16, 32, 64 -> 0, 1, 2
    return chunks ^ ((((chunks >> 3) - base) & (span // atom - 1)) << shift)
