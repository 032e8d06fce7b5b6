"""Scalar and vector arithmetic whose PTX meaning differs from NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

try:  # NumPy's own function without its dispatch in Python, which costs more than the counting
    from numpy._core.multiarray import count_nonzero
except ImportError:  # NumPy 1.x
    from numpy.core.multiarray import count_nonzero  # type: ignore[no-redef]

LaneSet = np.ndarray | None
"""Numbers of the lanes that execute; None: the whole warp."""
Poison = np.ndarray | None
"""Mask of the lanes whose value is undefined; None: none is."""


def constant(value: int, view: str) -> np.ndarray:
    """Return an array of one number, without an axis: a scalar is converted anew by every operation with an array."""
    return np.array(value, view)


def filled(size: int, value: Any, dtype: Any) -> np.ndarray:
    """Return an array of one number for some lanes, in half the time that ``np.full`` takes."""
    made = np.empty(size, dtype)
    made.fill(value)
    return made


_HALF_TIE = constant(0x10000000, "u8")
_LOW29 = constant(0x1FFFFFFF, "u8")
_ABOVE_TINY32 = constant(0x7F000000, "u4")
_EXPONENT32 = constant(0x7F800000, "u4")
_TINY32 = 2.0**-126


def from_bits(bits: int, view: str) -> np.generic:
    """Return the NumPy scalar of type code ``view`` with the given bits."""
    if view == "b1":
        return np.bool_(bits)
    width = int(view[1:])
    return np.frombuffer(bits.to_bytes(width, "little"), dtype=view)[0]


def distinct(values: Any) -> list:
    """Return the different values of a few lanes in ascending order (``np.unique`` first imports masked arrays)."""
    return sorted(set(values.tolist()))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Fused multiply-add of float32, rounded once to nearest even.

    The product is exact in float64; where the float64 sum lies on a float32 rounding boundary (or the result is
    subnormal) the sum is first rounded to odd, so that the second rounding cannot err.
    """
    product = a.astype("f8") * b
    total = product + c
    result = total.astype("f4")
    tie = (total.view("u8") & _LOW29) == _HALF_TIE
    all_large = count_nonzero(result.view("u4") & _ABOVE_TINY32) == result.size  # cheaper than the look below
    if all_large and not count_nonzero(tie):
        return result
    if count_nonzero(tie | ((np.abs(total) < _TINY32) & (total != 0))):
        return round_to_odd(product, c.astype("f8"), total).astype("f4")
    return result


def round_to_odd(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return ``a + b`` in float64 rounded to odd, given the sum rounded to nearest."""
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view("i8").copy()
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    bits[inexact] += away[inexact]
    return bits.view("f8")


def flush(x: np.ndarray) -> np.ndarray:
    """Flush float32 subnormals to zero, keeping the sign (``.ftz``)."""
    exponents = x.view("u4") & _EXPONENT32
    if count_nonzero(exponents) == exponents.size:
        return x
    return np.where(exponents == 0, np.copysign(np.float32(0), x), x)


def saturate(x: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1], NaN and -0 to +0 (``.sat``)."""
    zero = x.dtype.type(0)
    return np.where(np.isnan(x), zero, np.clip(x, zero, x.dtype.type(1)) + zero)


def round_f64(total: np.ndarray, error: np.ndarray, dtype: str, mode: str) -> np.ndarray:
    """Round ``total + error`` (float64 pair) to a narrower float type in mode rz, rm or rp."""
    near = total.astype(dtype)
    back = near.astype("f8")
    diff = (back - total) - error
    inf = near.dtype.type(np.inf)
    down = np.nextafter(near, -inf)
    up = np.nextafter(near, inf)
    if mode == "rm":
        fixed = np.where(diff > 0, down, near)
    elif mode == "rp":
        fixed = np.where(diff < 0, up, near)
    else:
        fixed = np.where((diff > 0) & (back > 0), down, np.where((diff < 0) & (back < 0), up, near))
    # An exact result, or a NaN, stays as it is.
    return np.where(np.isfinite(total), fixed, near)


def add_mode(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Add float32 in a directed rounding mode."""
    x, y = a.astype("f8"), b.astype("f8")
    total = x + y
    part = total - x
    return round_f64(total, (x - (total - part)) + (y - part), "f4", mode)


def mul_mode(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Multiply float32 in a directed rounding mode."""
    return round_f64(a.astype("f8") * b, np.zeros(len(a)), "f4", mode)


def fma_mode(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """Fused multiply-add of float32 in a directed rounding mode."""
    product, addend = a.astype("f8") * b, c.astype("f8")
    total = product + addend
    part = total - product
    return round_f64(total, (product - (total - part)) + (addend - part), "f4", mode)


def div_mode(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Divide float32 in a directed rounding mode."""
    x, y = a.astype("f8"), b.astype("f8")
    quotient = x / y
    residual = x.astype(np.longdouble) - quotient.astype(np.longdouble) * y.astype(np.longdouble)
    return round_f64(quotient, (residual / y).astype("f8"), "f4", mode)


def fmin(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """PTX min: NaN only if both are NaN, -0 below +0."""
    low = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero & (np.signbit(a) | np.signbit(b)), -low.dtype.type(0), low) if count_nonzero(zero) else low


def fmax(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """PTX max: NaN only if both are NaN, +0 above -0."""
    high = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    if count_nonzero(zero):
        return np.where(zero & ~(np.signbit(a) & np.signbit(b)), high.dtype.type(0), high)
    return high


def int_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer quotient truncated toward zero; division by zero gives all ones."""
    zero = b == 0
    if a.dtype.kind == "u":
        safe = np.where(zero, b.dtype.type(1), b)
        return np.where(zero, ~a.dtype.type(0), a // safe)
    wide = a.view(f"u{a.itemsize}")
    mag_a = np.where(a < 0, (~wide) + wide.dtype.type(1), wide)
    raw_b = b.view(f"u{b.itemsize}")
    mag_b = np.where(b < 0, (~raw_b) + raw_b.dtype.type(1), raw_b)
    quotient = mag_a // np.where(zero, mag_b.dtype.type(1), mag_b)
    signed = np.where((a < 0) != (b < 0), (~quotient) + quotient.dtype.type(1), quotient)
    return np.where(zero, ~signed.dtype.type(0), signed).view(a.dtype)


def int_rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer remainder with the sign of the dividend; by zero gives all ones, as on an H200 (PTX leaves it open)."""
    zero = b == 0
    return np.where(zero, ~a.dtype.type(0), a - int_div(a, np.where(zero, b.dtype.type(1), b)) * b)


def mul_hi(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of the double-width product."""
    if a.itemsize <= 4:
        wide = f"{a.dtype.kind}{a.itemsize * 2}"
        shift = a.dtype.type(0).nbytes * 8
        return ((a.astype(wide) * b.astype(wide)) >> np.dtype(wide).type(shift)).astype(a.dtype)
    mask = (1 << 64) - 1
    high = [((int(x) * int(y)) >> 64) & mask for x, y in zip(a, b, strict=False)]
    return np.array(high, dtype="u8").view(a.dtype)


def mul_wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Double-width product of 16- or 32-bit integers."""
    wide = f"{a.dtype.kind}{a.itemsize * 2}"
    return a.astype(wide) * b.astype(wide)


def shift_left(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Left shift; amounts of the width or more give zero."""
    bits = a.itemsize * 8
    big = amount >= bits
    value = a << np.where(big, np.uint32(0), amount).astype(a.dtype)
    return np.where(big, a.dtype.type(0), value)


def shift_right(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Right shift (arithmetic for signed arrays); amounts are clamped to the width."""
    bits = a.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(amount, np.uint32(bits - 1)).astype(a.dtype)
    big = amount >= bits
    return np.where(big, a.dtype.type(0), a >> np.where(big, np.uint32(0), amount).astype(a.dtype))


def saturating_add(a: np.ndarray, b: np.ndarray, sign: int) -> np.ndarray:
    """s32 addition (``sign`` 1) or subtraction (-1) clamped to the range."""
    total = a.astype("i8") + sign * b.astype("i8")
    info = np.iinfo(a.dtype)
    return np.clip(total, info.min, info.max).astype(a.dtype)
