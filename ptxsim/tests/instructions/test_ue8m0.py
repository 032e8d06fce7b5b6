"""Conversions to and from ue8m0, powers of two, against exact arithmetic.

Sources: the ISA's text on .satfinite and .rz/.rp of cvt; for magnitudes, subnormals and overflow CUDA's own software
version (cuda_fp8.hpp, __nv_cvt_bfloat16raw_to_e8m0): 2^-127 is the least value, what lies above it rounds up with .rp.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from simtest.single import run

FLOATS = np.array(
    [0.0, -0.0, 1.0, 1.5, -3.0, 2.0**-126, 2.0**-127, -(2.0**-127), 2.0**-128, 2.0**-149, 2.0**-127 + 2.0**-149,
     2.0**-127 - 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126 + 2.0**-149, 2.0**-127 * 1.5, 2.0**127, 2.0**127 * 1.5,
     3.4028234663852886e38, np.inf, -np.inf, np.nan, 1e-40, 6e-39, 1.1e-38, 0.75, 255.0, 256.0, 257.0, -1e-45, 1e10,
     2.0**-125 * 1.25, 448.0],
    "f4",
)  # fmt: skip


def encode(x: float, rounding: str, saturate: bool) -> int:
    """Return the exponent byte of 2^k next to |x|: the greatest not above (.rz) or the least not below (.rp)."""
    if math.isnan(x):
        return 255
    if math.isinf(x):
        return 254 if saturate else 255
    magnitude = abs(Fraction(x))
    powers = [Fraction(2) ** k for k in range(-127, 129)]
    if rounding == "rz":
        byte = max([k for k, p in enumerate(powers) if p <= magnitude], default=0)
    else:
        byte = min(k for k, p in enumerate(powers) if p >= magnitude)
    return min(byte, 254) if saturate else byte


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_from_float32(rounding: str, saturate: str) -> None:
    other = np.roll(FLOATS, 1)
    got = run(f"cvt.{rounding}{saturate}.ue8m0x2.f32 %d, %a, %b;", [FLOATS, other], np.zeros(32, "u2"))
    high, low = ([encode(float(v), rounding, bool(saturate)) for v in x] for x in (FLOATS, other))
    assert got.tolist() == [h << 8 | b for h, b in zip(high, low, strict=True)]


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_from_bf16(rounding: str, saturate: str) -> None:
    halves = FLOATS.astype(ml_dtypes.bfloat16)
    other = np.roll(halves, 1)
    packed = halves.view("u2").astype("u4") << 16 | other.view("u2")
    got = run(f"cvt.{rounding}{saturate}.ue8m0x2.bf16x2 %d, %a;", [packed], np.zeros(32, "u2"))
    high, low = ([encode(float(v), rounding, bool(saturate)) for v in x] for x in (halves, other))
    assert got.tolist() == [h << 8 | b for h, b in zip(high, low, strict=True)]


@pytest.mark.parametrize("first", range(0, 256, 32))
def test_to_bf16(first: int) -> None:
    codes = np.arange(first, first + 32)
    packed = (codes << 8 | 255 - codes).astype("u2")
    got = run("cvt.rn.bf16x2.ue8m0x2 %d, %a;", [packed], np.zeros(32, "u4"))

    def value(code: int) -> int:
        return 0x7FFF if code == 255 else int(np.float32(2.0 ** (code - 127)).view("u4")) >> 16

    assert got.tolist() == [value(int(c)) << 16 | value(255 - int(c)) for c in codes]
