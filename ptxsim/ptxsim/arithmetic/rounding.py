"""Exact rounding of real numbers, given as pairs of float64 or as fractions, to every floating-point format."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from . import numeric

DIRECTED = ("rz", "rm", "rp")
_MAX = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38}
NAN16 = np.uint16(0x7FFF)
"""The NaN that conversions to 16-bit floats make."""


def exact_pair(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 arrays whose sum is exactly ``x`` (an integer or floating array)."""
    if x.dtype.kind in "iu" and x.itemsize == 8:
        low = (x & x.dtype.type(0xFFFFFFFF)).astype("f8")
        high = (x >> x.dtype.type(32)).astype("f8") * 2.0**32
        total = high + low
        return total, low - (total - high)
    wide = x.astype("f8")
    return wide, np.zeros_like(wide)


def to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round ``total + error`` to an odd float64: a later rounding to a much narrower format is then exact."""
    bits = total.view("i8").copy()
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    bits[inexact] += np.where((error > 0) == (total > 0), 1, -1)[inexact]
    return bits.view("f8")


def odd32(x: np.ndarray) -> np.ndarray:
    """Round float64 to an odd float32."""
    near = x.astype("f4")
    away = (np.abs(near.astype("f8")) > np.abs(x)) & np.isfinite(x)
    down = np.where(away, np.nextafter(near, np.float32(0)), near)
    inexact = (down.astype("f8") != x) & np.isfinite(x)
    return (down.view("u4") | inexact.astype("u4")).view("f4")


def bf16_bits(x: np.ndarray, mode: str) -> np.ndarray:
    """Round float64 to bf16 bits in a mode; NaN becomes 0x7fff."""
    bits = odd32(x).view("u4")
    down, rest = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    if mode == "rn":
        up = (rest > 0x8000) | ((rest == 0x8000) & ((down & 1) == 1))
    else:
        negative = bits >> np.uint32(31) == 1
        up = (rest != 0) & {"rz": np.False_, "rm": negative, "rp": ~negative}[mode]
    return np.where(np.isnan(x), NAN16, (down + up).astype("u2"))


def narrow(total: np.ndarray, error: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """Round ``total + error`` (float64) to a format.

    Parameters
    ----------
    total, error : numpy.ndarray
        A number and what it lacks, see :func:`exact_pair`.
    kind : {'f16', 'bf16', 'f32', 'f64'}
        The format.
    mode : {'rn', 'rz', 'rm', 'rp'}
        The rounding.

    Returns
    -------
    numpy.ndarray
        float16, float32 or float64 values, or the bits of bf16.
    """
    if kind == "bf16":
        return bf16_bits(to_odd(total, error), mode)
    if kind == "f64":
        return _directed64(total, error, mode)
    code = "f2" if kind == "f16" else "f4"
    result = to_odd(total, error).astype(code) if mode == "rn" else numeric.round_f64(total, error, code, mode)
    return np.where(np.isnan(total), NAN16.view("f2"), result) if kind == "f16" else result


def _directed64(total: np.ndarray, error: np.ndarray, mode: str) -> np.ndarray:
    if mode == "rn":
        return total
    below = np.where(error < 0, np.nextafter(total, -np.inf), total)
    above = np.where(error > 0, np.nextafter(total, np.inf), total)
    return {"rm": below, "rp": above, "rz": np.where(total > 0, below, above)}[mode]


def saturated(value: np.ndarray, kind: str) -> np.ndarray:
    """Replace infinities by the largest finite value of the format (``.satfinite``)."""
    if kind == "bf16":
        return np.where((value & 0x7FFF) == 0x7F80, (value & 0x8000) | 0x7F7F, value).astype("u2")
    return np.clip(value, value.dtype.type(-_MAX[kind]), value.dtype.type(_MAX[kind]))


# ---- float64 through fractions -------------------------------------------------------------------------------------
def round_fraction(exact: Fraction, mode: str) -> float:
    """Round a non-zero rational number to float64 in a mode."""
    try:
        near = exact.numerator / exact.denominator
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    if mode == "rn":
        return near
    toward = {"rm": -math.inf, "rp": math.inf, "rz": 0.0}[mode]
    beyond = math.isinf(near) or Fraction(near) != exact
    if not beyond:
        return near
    above = near > 0 if math.isinf(near) else Fraction(near) > exact
    down = mode == "rm" or (mode == "rz" and exact > 0)
    if above == down:
        return math.nextafter(near, toward)
    return near


_EXACT64: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "fma": lambda a, b, c: a * b + c,
}
_TERMS: dict[str, Callable] = {
    "add": lambda a, b: (a, b),
    "sub": lambda a, b: (a, -b),
    "fma": lambda a, b, c: (a * b, c),
}


def arithmetic64(name: str, mode: str, *args: np.ndarray) -> np.ndarray:
    """Compute add, sub, mul, div or fma of float64 arrays, rounded once in a mode."""
    function = _EXACT64[name]
    result = function(*args).copy()
    for i in np.flatnonzero(np.logical_and.reduce([np.isfinite(a) for a in args])):
        exact = None if name == "div" and args[1][i] == 0 else function(*(Fraction(float(a[i])) for a in args))
        if exact:
            result[i] = round_fraction(exact, mode)
        elif mode == "rm" and exact == 0 and name in _TERMS:
            signs = [bool(np.signbit(term)) for term in _TERMS[name](*(a[i] for a in args))]
            result[i] = -0.0 if any(signs) else 0.0
    return result


def sqrt64(x: np.ndarray, mode: str) -> np.ndarray:
    """Square root of float64 in a mode."""
    result = np.sqrt(x)
    if mode == "rn":
        return result
    for i in np.flatnonzero(np.isfinite(x) & (x > 0)):
        root, exact = float(result[i]), Fraction(float(x[i]))
        square = Fraction(root) ** 2
        if mode == "rp" and square < exact:
            result[i] = math.nextafter(root, math.inf)
        elif mode != "rp" and square > exact:
            result[i] = math.nextafter(root, 0.0)
    return result
