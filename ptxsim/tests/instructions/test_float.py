"""Floating-point arithmetic and conversions against exact rational formulas, written from the PTX ISA."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from simtest.single import EDGES32, FLOATS, run

RNG = np.random.default_rng(3)
X = FLOATS
Y = np.roll(FLOATS, 7)
Z = np.roll(FLOATS, 13)


def nearest32(value: Fraction) -> np.float32:
    """Round an exact number to float32, ties to even, by comparing neighbours."""
    guess = (
        np.float32(float(value)) if abs(value) < Fraction(2) ** 200 else np.float32(np.inf * (1 if value > 0 else -1))
    )
    best = guess
    for candidate in (np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))):
        if not np.isfinite(candidate):
            continue
        if not np.isfinite(best):
            continue
        d, e = abs(Fraction(float(candidate)) - value), abs(Fraction(float(best)) - value)
        if d < e or (d == e and int(candidate.view("u4")) % 2 == 0):
            best = candidate
    return best


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Compare floats bit for bit, any NaN equal to any NaN."""
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    width = f"u{want.itemsize}"
    assert got.view(width)[~nan].tolist() == want.view(width)[~nan].tolist()


def test_fma_rounds_once() -> None:
    # Products whose sum falls on a float32 tie, where two roundings differ from one.
    a = np.float32(1) + RNG.integers(0, 1 << 23, 32).astype("f4") * np.float32(2.0**-23)
    b = np.float32(1) + RNG.integers(0, 1 << 23, 32).astype("f4") * np.float32(2.0**-23)
    c = np.ldexp(np.float32(1), RNG.integers(-40, 30, 32)).astype("f4")
    a[:2], b[:2] = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)
    c[:2] = np.array([2.0**-60, -(2.0**-60)], "f4")
    got = run("fma.rn.f32 %d, %a, %b, %c;", [a, b, c], np.zeros(32, "f4"))
    want = [
        nearest32(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)))
        for p, q, r in zip(a, b, c, strict=False)
    ]
    same(got, np.array(want, "f4"))


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_basic_operations(name: str) -> None:
    got = run(f"{name}.f32 %d, %a, %b;", [X, Y], np.zeros(32, "f4"))
    with np.errstate(all="ignore"):
        want = {"add": X + Y, "sub": X - Y, "mul": X * Y}[name]
    same(got, want)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str) -> None:
    a = RNG.standard_normal(32).astype("f4")
    b = (RNG.standard_normal(32) * 1e-3).astype("f4")
    got = run(f"add.{mode}.f32 %d, %a, %b;", [a, b], np.zeros(32, "f4"))
    for value, p, q in zip(got, a, b, strict=False):
        exact = Fraction(float(p)) + Fraction(float(q))
        low = value if Fraction(float(value)) <= exact else np.nextafter(value, np.float32(-np.inf))
        high = low if Fraction(float(low)) == exact else np.nextafter(low, np.float32(np.inf))
        want = {"rm": low, "rp": high, "rz": low if exact > 0 else high}[mode]
        assert value == want


def test_flush_to_zero_keeps_the_sign() -> None:
    got = run("add.ftz.f32 %d, %a, %b;", [np.full(32, -1e-40, "f4"), np.full(32, -0.0, "f4")], np.zeros(32, "f4"))
    assert got.view("u4").tolist() == [0x80000000] * 32
    kept = run("add.f32 %d, %a, %b;", [np.full(32, -1e-40, "f4"), np.full(32, -0.0, "f4")], np.zeros(32, "f4"))
    assert kept[0] == np.float32(-1e-40)


def test_min_max_of_nan_and_zero() -> None:
    a = np.array([np.nan, 1, 0.0, -0.0, np.nan] + [2] * 27, "f4")
    b = np.array([1, np.nan, -0.0, 0.0, np.nan] + [3] * 27, "f4")
    high = run("max.f32 %d, %a, %b;", [a, b], np.zeros(32, "f4"))
    low = run("min.f32 %d, %a, %b;", [a, b], np.zeros(32, "f4"))
    assert high[:2].tolist() == [1, 1]
    assert high.view("u4")[2:4].tolist() == [0, 0]
    assert low.view("u4")[2:4].tolist() == [0x80000000] * 2
    assert np.isnan(high[4])
    assert np.isnan(run("max.NaN.f32 %d, %a, %b;", [a, b], np.zeros(32, "f4"))[:2]).all()


def test_saturation() -> None:
    got = run("add.sat.f32 %d, %a, %b;", [X, np.zeros(32, "f4")], np.zeros(32, "f4"))
    want = [0.0 if np.isnan(v) else min(max(float(v), 0.0), 1.0) for v in X]
    assert got.tolist() == np.array(want, "f4").tolist()


@pytest.mark.parametrize(
    ("code", "formula", "values"),
    [
        ("ex2.approx.ftz.f32", lambda x: 2.0**x, np.linspace(-20, 20, 32)),
        ("lg2.approx.f32", np.log2, np.linspace(0.01, 50, 32)),
        ("rcp.rn.f32", lambda x: 1 / x, np.linspace(0.1, 9, 32)),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, np.linspace(-9, -0.1, 32)),
        ("sqrt.rn.f32", np.sqrt, np.linspace(0, 9, 32)),
        ("rsqrt.approx.f32", lambda x: x**-0.5, np.linspace(0.1, 9, 32)),
        ("sin.approx.f32", np.sin, np.linspace(-3, 3, 32)),
        ("cos.approx.f32", np.cos, np.linspace(-3, 3, 32)),
        ("tanh.approx.f32", np.tanh, np.linspace(-3, 3, 32)),
    ],
)
def test_special_functions(code: str, formula: object, values: np.ndarray) -> None:
    x = values.astype("f4")
    got = run(f"{code} %d, %a;", [x], np.zeros(32, "f4"))
    np.testing.assert_allclose(got, formula(x.astype("f8")), rtol=2.0**-22, atol=2.0**-24)


def test_approximations_at_the_limits() -> None:
    x = np.array([np.inf, -np.inf, 0.0, -0.0, np.nan] + [1.0] * 27, "f4")
    assert run("ex2.approx.f32 %d, %a;", [x], np.zeros(32, "f4"))[:3].tolist() == [np.inf, 0.0, 1.0]
    assert run("rcp.approx.f32 %d, %a;", [x], np.zeros(32, "f4")).view("u4")[:4].tolist() == [
        0, 0x80000000, 0x7F800000, 0xFF800000,
    ]  # fmt: skip
    lg = run("lg2.approx.f32 %d, %a;", [x], np.zeros(32, "f4"))
    assert lg[0] == np.inf
    assert lg[2] == lg[3] == -np.inf
    assert np.isnan(lg[1])


def test_float_to_integer_saturates() -> None:
    got = run("cvt.rzi.s32.f32 %d, %a;", [X], np.zeros(32, "i4"))
    want = [0 if np.isnan(v) else int(max(min(np.trunc(np.float64(v)), 2**31 - 1), -(2**31))) for v in X]
    assert got.tolist() == want
    got = run("cvt.rni.u32.f32 %d, %a;", [X], np.zeros(32, "u4"))
    assert got.tolist() == [0 if np.isnan(v) else int(max(min(np.rint(np.float64(v)), 2**32 - 1), 0)) for v in X]


def test_integer_to_float() -> None:
    got = run("cvt.rn.f32.u32 %d, %a;", [EDGES32], np.zeros(32, "f4"))
    same(got, np.array([nearest32(Fraction(int(v))) for v in EDGES32], "f4"))
    got = run("cvt.rz.f32.s32 %d, %a;", [EDGES32], np.zeros(32, "f4"))
    for value, source in zip(got, EDGES32.view("i4").tolist(), strict=False):
        assert abs(Fraction(float(value))) <= abs(source)
        if Fraction(float(value)) != source:
            assert abs(Fraction(float(np.nextafter(value, np.float32(np.inf * source))))) > abs(source)


def test_integer_conversions_extend_truncate_and_saturate() -> None:
    assert run("cvt.s64.s32 %d, %a;", [EDGES32], np.zeros(32, "i8")).tolist() == EDGES32.view("i4").tolist()
    assert run("cvt.u64.u32 %d, %a;", [EDGES32], np.zeros(32, "u8")).tolist() == EDGES32.tolist()
    low = run(".reg .b16 %h; cvt.u16.u32 %h, %a; cvt.u32.u16 %d, %h;", [EDGES32], np.zeros(32, "u4"))
    assert low.tolist() == [int(v) & 0xFFFF for v in EDGES32]
    byte = run("cvt.s32.s8 %d, %a;", [EDGES32], np.zeros(32, "i4"))
    assert byte.tolist() == [((int(v) & 255) ^ 128) - 128 for v in EDGES32]
    sat = run(".reg .b16 %h; cvt.sat.s8.s32 %h, %a; cvt.s32.s8 %d, %h;", [EDGES32], np.zeros(32, "i4"))
    assert sat.tolist() == [max(min(int(v), 127), -128) for v in EDGES32.view("i4")]


def bf16_nearest(x: np.float32) -> int:
    """Round a float32 to bf16 bits by the ISA's rule, ties to even; NaN is 0x7fff."""
    bits = int(np.float32(x).view("u4"))
    if np.isnan(x):
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def test_packed_bf16_conversion_puts_the_first_source_high() -> None:
    got = run("cvt.rn.bf16x2.f32 %d, %a, %b;", [X, Y], np.zeros(32, "u4"))
    assert got.tolist() == [bf16_nearest(a) << 16 | bf16_nearest(b) for a, b in zip(X, Y, strict=False)]


def test_f16_conversion_overflows_to_infinity() -> None:
    got = run("cvt.rn.f16.f32 %d, %a;", [X], np.zeros(32, "u2"))
    with np.errstate(all="ignore"):
        want = X.astype("f2").view("u2")
    want = np.where(np.isnan(X), 0x7FFF, want)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize(
    ("name", "dtype", "limit"), [("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)]
)
def test_fp8_conversion_saturates(name: str, dtype: type, limit: float) -> None:
    got = run(f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;", [X, Y], np.zeros(32, "u2"))
    table = np.arange(256, dtype="u1").view(dtype).astype("f8")

    def encode(v: np.float32) -> int:
        if np.isnan(v):
            return 0x7F
        value = min(max(float(v), -limit), limit)
        codes = [c for c in range(256) if np.isfinite(table[c]) and (c >> 7) == int(np.signbit(v))]
        best = min(abs(table[c] - value) for c in codes)
        near = [c for c in codes if abs(table[c] - value) == best]
        return min(near, key=lambda c: c & 1)

    assert got.tolist() == [encode(a) << 8 | encode(b) for a, b in zip(X, Y, strict=False)]
    pairs = np.arange(32, dtype="u2") * np.uint16(0x0805)
    wide = run(f"cvt.rn.f16x2.{name}x2 %d, %a;", [pairs], np.zeros(32, "u4")).view("f2").reshape(32, 2)
    expected = np.stack([table[pairs & 255], table[pairs >> 8]], 1).astype("f2")
    same(wide.copy().reshape(-1), expected.reshape(-1))


def test_ue8m0() -> None:
    x = np.array([1.0, 1.5, 2.0, 3.0, 2.0**-127, 2.0**-126, 0.75, np.inf, np.nan] + [4.0] * 23, "f4")
    up = run("cvt.rp.satfinite.ue8m0x2.f32 %d, %a, %a;", [x], np.zeros(32, "u2"))
    down = run("cvt.rz.satfinite.ue8m0x2.f32 %d, %a, %a;", [x], np.zeros(32, "u2"))
    assert (up & 255)[:9].tolist() == [127, 128, 128, 129, 0, 1, 127, 254, 255]
    assert (down >> 8)[:9].tolist() == [127, 127, 128, 128, 0, 1, 126, 254, 255]


def test_packed_half_arithmetic() -> None:
    a = RNG.standard_normal((32, 2)).astype("f2")
    b = RNG.standard_normal((32, 2)).astype("f2")
    raw = [v.reshape(-1).view("u4") for v in (a, b)]
    got = run("fma.rn.f16x2 %d, %a, %b, %a;", raw, np.zeros(32, "u4")).view("f2").reshape(32, 2)
    want = (a.astype("f8") * b.astype("f8") + a.astype("f8")).astype("f2")
    same(got.reshape(-1).copy(), want.reshape(-1))
    p, q = (v.astype("f4").astype(ml_dtypes.bfloat16) for v in (a, b))
    raw = [v.reshape(-1).view("u4") for v in (p, q)]
    got = run("mul.rn.bf16x2 %d, %a, %b;", raw, np.zeros(32, "u4")).view("u2")
    exact = p.astype("f4") * q.astype("f4")
    assert got.tolist() == [bf16_nearest(v) for v in exact.reshape(-1)]


def test_f32x2_works_on_both_halves() -> None:
    a, b = RNG.standard_normal((32, 2)).astype("f4"), RNG.standard_normal((32, 2)).astype("f4")
    raw = [v.reshape(-1).view("u8") for v in (a, b)]
    got = run("mul.rn.f32x2 %d, %a, %b;", raw, np.zeros(32, "u8")).view("f4")
    assert got.tolist() == (a * b).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: a == a and b == b and a != b),
        ("neu", lambda a, b: a != b),
        ("lt", lambda a, b: a < b),
        ("ltu", lambda a, b: not a >= b),
        ("num", lambda a, b: a == a and b == b),
        ("nan", lambda a, b: a != a or b != b),
    ],
)
def test_float_comparison_with_nan(name: str, formula: object) -> None:
    y = Y.copy()
    y[:4] = X[:4]
    got = run(f"setp.{name}.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", [X, y], np.zeros(32, "u4"))
    assert got.tolist() == [int(formula(float(a), float(b))) for a, b in zip(X, y, strict=False)]


def test_f64() -> None:
    a, b = RNG.standard_normal(32), RNG.standard_normal(32)
    assert run("div.rn.f64 %d, %a, %b;", [a, b], np.zeros(32)).tolist() == (a / b).tolist()
    got = run("fma.rn.f64 %d, %a, %b, %a;", [a, b], np.zeros(32))
    exact = [Fraction(p) * Fraction(q) + Fraction(p) for p, q in zip(a, b, strict=False)]
    assert got.tolist() == [float(v) for v in exact]
