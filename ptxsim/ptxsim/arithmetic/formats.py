"""Sixteen-bit floats: rounding to them, widening from them, halves of packed pairs."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .numeric import count_nonzero
from .rounding import odd32


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 or float64 to bf16 bits; NaN becomes 0x7fff."""
    if x.dtype == np.float64:
        x = odd32(x)
    bits = x.astype(ml_dtypes.bfloat16).view("u2")
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), bits) if count_nonzero(nan) else bits


def to_f16(x: np.ndarray) -> np.ndarray:
    """Round to f16 values; NaN becomes 0x7fff."""
    half = x.astype("f2")
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF).view("f2"), half) if count_nonzero(nan) else half


def from_bf16(x: np.ndarray) -> np.ndarray:
    """Widen bf16 bits to float32."""
    return (x.astype("u4") << np.uint32(16)).view("f4")


def flush_half(x: np.ndarray) -> np.ndarray:
    """Flush f16 subnormals (held as f16 or float32) to zero, keeping the sign."""
    return np.where(np.abs(x) < x.dtype.type(2.0**-14), np.copysign(x.dtype.type(0), x), x)


def halves_f16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high halves of packed f16 as float32."""
    pair = np.ascontiguousarray(x).view("f2").reshape(-1, 2).astype("f4")
    return pair[:, 0], pair[:, 1]


def halves_bf16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high halves of packed bf16 as float32."""
    return (x << np.uint32(16)).view("f4"), (x & np.uint32(0xFFFF0000)).view("f4")
