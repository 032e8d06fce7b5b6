"""Floating-point instructions that only sm_100a has, and small floats, against exact rational arithmetic."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from simtest import exact
from simtest.single import FLOATS, run

X, Y, Z = FLOATS, np.roll(FLOATS, 7), np.roll(FLOATS, 13)
PAIRS = [np.stack([v, np.roll(v, 3)], 1).reshape(-1) for v in (X, Y, Z)]


def bits(values: np.ndarray) -> list[exact.Num]:
    """Return float32 values as exact numbers."""
    return [exact.decode(int(v), "f32") for v in values.view("u4")]


def same(got: np.ndarray, want: list[exact.Num], mode: str = "rn", form: str = "f32") -> None:
    """Compare raw results with exact ones, any NaN equal to any NaN."""
    for index, (a, b) in enumerate(zip(got.tolist(), want, strict=True)):
        if not (b.nan and exact.decode(a, form).nan):
            assert a == exact.encode(b, form, mode), index


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_of_floats(name: str, ftz: str, mode: str) -> None:
    raw = [v.view("u8") for v in PAIRS]
    operands = "%a, %b, %c" if name == "fma" else "%a, %b"
    got = run(f"{name}.{mode}{ftz}.f32x2 %d, {operands};", raw, np.zeros(32, "u8")).view("u4")
    args = [[exact.flushed(x, "f32") for x in bits(v)] if ftz else bits(v) for v in PAIRS]
    function = {
        "add": lambda a, b, c: exact.total(a, b, mode),
        "sub": lambda a, b, c: exact.total(a, -b, mode),
        "mul": lambda a, b, c: exact.product(a, b),
        "fma": lambda a, b, c: exact.total(exact.product(a, b), c, mode),
    }[name]
    want = [exact.decode(exact.encode(function(*x), "f32", mode), "f32") for x in zip(*args, strict=True)]
    same(got, [exact.flushed(x, "f32") for x in want] if ftz else want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("form", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_narrow_operands_of_float32_arithmetic(name: str, form: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 65536, 32).astype("u2") for _ in range(2))
    operands = "%a, %b, %c" if name == "fma" else "%a, %c"
    got = run(f"{name}.{mode}.f32.{form} %d, {operands};", [a, b, Z], np.zeros(32, "u4"))
    p, q = ([exact.decode(int(v), form) for v in narrow] for narrow in (a, b))
    if name == "fma":
        want = [exact.total(exact.product(x, y), z, mode) for x, y, z in zip(p, q, bits(Z), strict=True)]
    else:
        want = [exact.total(x, -z if name == "sub" else z, mode) for x, z in zip(p, bits(Z), strict=True)]
    same(got, want, mode)


@pytest.mark.parametrize("mods", ["", ".NaN", ".abs", ".NaN.abs", ".ftz"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_minimum_of_three(name: str, mods: str) -> None:
    got = run(f"{name}{mods.replace('.ftz', '')}{'.ftz' * ('ftz' in mods)}.f32 %d, %a, %b, %c;", [X, Y, Z],
              np.zeros(32, "u4"))  # fmt: skip
    want = []
    for args in zip(bits(X), bits(Y), bits(Z), strict=True):
        values = [exact.flushed(x, "f32") for x in args] if "ftz" in mods else list(args)
        values = [exact.Num(False, x.size) for x in values] if "abs" in mods else values
        if "NaN" in mods and any(x.nan for x in values):
            want.append(exact.NAN)
            continue
        values = values if name == "min" else [-x for x in values]
        best = exact.smaller(exact.smaller(*values[:2]), values[2])
        want.append(best if name == "min" or best.nan else -best)
    same(got, want)


SMALL = {
    "e4m3": (4, 3, 7, 448),
    "e5m2": (5, 2, 15, 57344),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28),
    "e2m1": (2, 1, 1, 6),
}


def small_value(code: int, name: str) -> Fraction:
    """Return the size of a code's value by the format's definition (no NaN, no infinity)."""
    _, fraction_bits, bias, _ = SMALL[name]
    exponent, fraction = code >> fraction_bits, Fraction(code & ((1 << fraction_bits) - 1), 1 << fraction_bits)
    if exponent == 0:
        return fraction * Fraction(2) ** (1 - bias)
    return (1 + fraction) * Fraction(2) ** (exponent - bias)


def small_code(x: exact.Num, name: str) -> int:
    """Round to nearest even and saturate; NaN is 0x7f in 8 bits and the largest value in fewer."""
    exponent_bits, fraction_bits, _, largest = SMALL[name]
    width = exponent_bits + fraction_bits
    codes = [c for c in range(1 << width) if small_value(c, name) <= Fraction(largest)]
    if x.nan:
        return 0x7F if width == 7 else codes[-1]
    size = min(x.size, Fraction(largest)) if not x.infinite else Fraction(largest)
    best = min(codes, key=lambda c: (abs(small_value(c, name) - size), c & 1))
    return best | x.negative << width


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", SMALL)
def test_small_floats(name: str, relu: str) -> None:
    grid = [
        v * s
        for v, s in itertools.product(
            [0.0, 0.06, 0.25, 0.3125, 0.75, 1.25, 2.5, 3.5, 4.75, 7.25, 7.75, 26, 30, 100, 440, 464], (1, -1)
        )
    ]
    values = np.array(grid, "f4")
    other = np.roll(FLOATS, 3)
    holder = ".reg .b8 %e; " if name == "e2m1" else ""
    target = "%e" if name == "e2m1" else "%d"
    tail = " mov.b16 %d, {%e, 0};" if name == "e2m1" else ""
    got = run(
        f"{holder}cvt.rn.satfinite{relu}.{name}x2.f32 {target}, %a, %b;{tail}", [values, other], np.zeros(32, "u2")
    )
    shift = 4 if name == "e2m1" else 8

    def clamp(x: exact.Num) -> exact.Num:
        return exact.ZERO if relu and not x.nan and x.negative else x

    want = [
        small_code(clamp(a), name) << shift | small_code(clamp(b), name)
        for a, b in zip(bits(values), bits(other), strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("name", ["e2m3", "e3m2", "e2m1"])
def test_small_floats_widen(name: str) -> None:
    exponent_bits, fraction_bits, *_ = SMALL[name]
    width = exponent_bits + fraction_bits + 1
    codes = (np.arange(32) * 5 + 1) % (1 << width)
    second = (np.arange(32) * 3) % (1 << width)
    shift = 4 if name == "e2m1" else 8
    packed = (codes | second << shift).astype("u2")
    read = (
        ".reg .b8 %e, %x; mov.b16 {%e, %x}, %a; cvt.rn.f16x2.e2m1x2 %d, %e;"
        if name == "e2m1"
        else f"cvt.rn.f16x2.{name}x2 %d, %a;"
    )
    got = run(read, [packed], np.zeros(32, "u4")).view("u2").reshape(32, 2)
    for lane in range(32):
        for value, code in zip(got[lane].tolist(), (int(codes[lane]), int(second[lane])), strict=True):
            negative, body = code >> (width - 1), code & ((1 << (width - 1)) - 1)
            assert value == exact.encode(exact.Num(bool(negative), small_value(body, name)), "f16")


@pytest.mark.parametrize("relu", ["", ".relu"])
def test_tf32_saturates(relu: str) -> None:
    got = run(f"cvt.rn{relu}.satfinite.tf32.f32 %d, %a;", [X], np.zeros(32, "u4"))
    for value, x in zip(got.tolist(), bits(X), strict=True):
        if x.nan:
            assert exact.decode(value, "f32").nan
            continue
        x = exact.ZERO if relu and x.negative else x
        size = min(x.size, (2 - Fraction(1, 1 << 10)) * Fraction(2) ** 127)
        assert value == exact.encode(exact.Num(x.negative, size), "tf32")
