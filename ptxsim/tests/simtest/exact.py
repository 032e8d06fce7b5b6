"""Floating-point arithmetic of the PTX ISA on exact rational numbers: slow, plain, and independent of the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

#: Bits of the significand, smallest and largest exponent, bits in all.
FORMATS = {"f16": (11, -14, 15, 16), "bf16": (8, -126, 127, 16), "tf32": (11, -126, 127, 32),
           "f32": (24, -126, 127, 32),
           "f64": (53, -1022, 1023, 64)}  # fmt: skip
#: tf32 lies in the upper bits of a float32.
_SHIFT = {"tf32": 13}
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFFFFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}


@dataclass(frozen=True)
class Num:
    """NaN (``size`` None), infinity (``size`` infinite) or a finite number, with the sign of zeros too."""

    negative: bool
    size: Fraction | float | None

    @property
    def nan(self) -> bool:
        """Tell whether this is NaN."""
        return self.size is None

    @property
    def infinite(self) -> bool:
        """Tell whether this is an infinity."""
        return self.size == math.inf

    @property
    def value(self) -> Fraction | float:
        """The signed value (NaN has none)."""
        return -self.size if self.negative else self.size

    def __neg__(self) -> Num:
        return replace(self, negative=not self.negative)


NAN, ZERO, ONE = Num(False, None), Num(False, Fraction(0)), Num(False, Fraction(1))


def number(value: Fraction | int) -> Num:
    """Return a rational number."""
    return Num(value < 0, abs(Fraction(value)))


def decode(bits: int, form: str) -> Num:
    """Read a number from its bits."""
    precision, low, high, width = FORMATS[form]
    bits >>= _SHIFT.get(form, 0)
    width -= _SHIFT.get(form, 0)
    fraction_bits = precision - 1
    negative = bool(bits >> (width - 1) & 1)
    exponent = bits >> fraction_bits & ((1 << (width - 1 - fraction_bits)) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if exponent + low - 1 > high:
        return Num(negative, None) if fraction else Num(negative, math.inf)
    significand = fraction | (1 << fraction_bits if exponent else 0)
    return Num(negative, Fraction(significand) * Fraction(2) ** (max(exponent, 1) + low - 1 - fraction_bits))


def encode(x: Num, form: str, mode: str = "rn") -> int:
    """Round a number to a format (``rna``: ties away from zero) and return its bits."""
    precision, low, high, width = FORMATS[form]
    if x.nan:
        return _NAN[form]
    body = width - 1 - _SHIFT.get(form, 0)
    infinity = (high - low + 2) << (precision - 1)
    if x.infinite:
        code = infinity
    else:
        exponent = low
        if x.size:
            exponent = max(low, x.size.numerator.bit_length() - x.size.denominator.bit_length())
            exponent -= exponent > low and Fraction(2) ** exponent > x.size
        unit = Fraction(2) ** (exponent - precision + 1)
        whole, rest = divmod(x.size, unit)
        up = {
            "rn": rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1),
            "rna": rest * 2 >= unit,
            "rz": False,
            "rm": x.negative and rest != 0,
            "rp": not x.negative and rest != 0,
        }[mode]
        code = int(whole) + up + ((exponent - low) << (precision - 1))
        if code >= infinity:
            away = mode in ("rn", "rna") or (mode == "rm" and x.negative) or (mode == "rp" and not x.negative)
            code = infinity if away else infinity - 1
    return (code | x.negative << body) << _SHIFT.get(form, 0)


def flushed(x: Num, form: str) -> Num:
    """Make a subnormal zero."""
    tiny = not x.nan and x.size < Fraction(2) ** FORMATS[form][1]
    return replace(x, size=Fraction(0)) if tiny else x


def total(x: Num, y: Num, mode: str) -> Num:
    """Add."""
    if x.nan or y.nan or (x.infinite and y.infinite and x.negative != y.negative):
        return NAN
    if x.infinite or y.infinite:
        return x if x.infinite else y
    value = x.value + y.value
    if value:
        return number(value)
    return Num(x.negative if x.negative == y.negative else mode == "rm", Fraction(0))


def product(x: Num, y: Num) -> Num:
    """Multiply."""
    if x.nan or y.nan or (x.infinite and y.size == 0) or (y.infinite and x.size == 0):
        return NAN
    return Num(x.negative != y.negative, math.inf if x.infinite or y.infinite else x.size * y.size)


def quotient(x: Num, y: Num) -> Num:
    """Divide."""
    if x.nan or y.nan or (x.infinite and y.infinite) or (x.size == 0 and y.size == 0):
        return NAN
    negative = x.negative != y.negative
    if x.infinite or y.size == 0:
        return Num(negative, math.inf)
    return Num(negative, Fraction(0) if y.infinite else x.size / y.size)


def root(x: Num, form: str) -> Num:
    """Take the square root: exactly, or close enough beside a square that rounding in any mode comes out right."""
    if x.nan or (x.negative and x.size):
        return NAN
    if x.infinite or x.size == 0:
        return x
    scale = 1 << (4 * FORMATS[form][0] + 40)
    shift = Fraction(2) ** (2 * max(0, -FORMATS[form][1] + FORMATS[form][0]))
    scaled = x.size * shift * scale * scale
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(whole) ** 2 == scaled
    size = (Fraction(whole) if exact else Fraction(2 * whole + 1, 2)) / scale
    return Num(False, size / Fraction(2) ** max(0, -FORMATS[form][1] + FORMATS[form][0]))


def smaller(x: Num, y: Num) -> Num:
    """Return the minimum as the ISA's min: the other one beside NaN, -0 below +0."""
    if x.nan or y.nan:
        return y if x.nan else x
    if x.value == y.value:
        return x if x.negative else y
    return x if x.value < y.value else y


def integral(x: Num, mode: str) -> Num:
    """Round to an integer in a mode rni, rzi, rmi or rpi, keeping the sign of zero."""
    if x.nan or x.infinite:
        return x
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](x.value)
    return Num(x.negative, Fraction(abs(whole)))
