"""Emitters of floating-point arithmetic: f32, f64, f16, bf16 and their packed forms."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from . import numeric
from .codegen import Codegen
from .ir import TYPE_BITS, Instr
from .ops_alu import halves_bf16
from .registry import Mods, op

_TYPES = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 or float64 to bf16 bits; NaN becomes 0x7fff."""
    if x.dtype == np.float64:
        x = _narrow_odd(x)
    bits = x.astype(ml_dtypes.bfloat16).view("u2")
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), bits) if np.count_nonzero(nan) else bits


def _narrow_odd(x: np.ndarray) -> np.ndarray:
    """Round float64 to odd in float32, so that a further rounding is exact."""
    near = x.astype("f4")
    away = (np.abs(near.astype("f8")) > np.abs(x)) & np.isfinite(near)
    down = np.where(away, np.nextafter(near, np.float32(0)), near)
    inexact = (down.astype("f8") != x) & np.isfinite(x)
    return (down.view("u4") | inexact.astype("u4")).view("f4")


def to_f16(x: np.ndarray) -> np.ndarray:
    """Round to f16 values; NaN becomes 0x7fff."""
    half = x.astype("f2")
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF).view("f2"), half) if np.count_nonzero(nan) else half


def from_bf16(x: np.ndarray) -> np.ndarray:
    """Widen bf16 bits to float32."""
    return (x.astype("u4") << np.uint32(16)).view("f4")


def widened(function: Callable, type_name: str, ftz: bool = False) -> Callable:
    """Return ``function`` (written for float64 arrays) for arrays of a 16-bit or packed type."""
    if type_name == "f16":
        return lambda *a: to_f16(function(*(x.astype("f8") for x in a)))
    if type_name == "bf16":
        return lambda *a: to_bf16(function(*(from_bf16(x).astype("f8") for x in a)))
    if type_name == "f16x2":

        def run_f16x2(*args: np.ndarray) -> np.ndarray:
            wide = [np.ascontiguousarray(x).view("f2").astype("f8") for x in args]
            return to_f16(function(*wide)).view("u4")

        return run_f16x2
    if type_name == "bf16x2":

        def run_bf16x2(*args: np.ndarray) -> np.ndarray:
            low, high = zip(*(halves_bf16(x) for x in args), strict=False)
            parts = [to_bf16(function(*(x.astype("f8") for x in side))) for side in (low, high)]
            return parts[0].astype("u4") | parts[1].astype("u4") << np.uint32(16)

        return run_bf16x2
    raise AssertionError(type_name)


def pairwise32(function: Callable) -> Callable:
    """Return a float32 function for .f32x2 (two floats in 64 bits)."""

    def run(*args: np.ndarray) -> np.ndarray:
        return function(*(np.ascontiguousarray(x).view("f4") for x in args)).view("u8")

    return run


def _modifiers(mods: Mods) -> tuple[str, bool, bool]:
    rounding = mods.choose(*_ROUNDINGS, default="rn")
    return rounding, mods.flag("ftz"), mods.flag("sat")


def finish(expr: str, ftz: bool, sat: bool) -> str:
    """Wrap a float32 expression in output flushing and saturation."""
    if ftz:
        expr = f"flush({expr})"
    return f"saturate({expr})" if sat else expr


_PLAIN = {"add": "{a} + {b}", "sub": "{a} - {b}", "mul": "{a} * {b}"}
_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _directed(name: str, mode: str) -> Callable:
    if name == "mul":
        return lambda a, b: numeric.mul_mode(a, b, mode)
    if name == "sub":
        return lambda a, b: numeric.add_mode(a, -b, mode)
    return lambda a, b: numeric.add_mode(a, b, mode)


def float_binary(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit add, sub or mul."""
    type_name = mods.type(*_TYPES)
    rounding, ftz, sat = _modifiers(mods)
    dst, a, b = mods.args(3)
    if mods.left and type_name == "f32" and mods.left[-1:] in (["f16"], ["bf16"]):
        return _mixed(cg, ins, mods, dst, [a, b])
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if type_name == "f32":
        if ftz:
            x, y = f"flush({x})", f"flush({y})"
        if rounding == "rn":
            expr = f"({_PLAIN[ins.op].format(a=x, b=y)})"
        else:
            expr = f"{cg.bind(_directed(ins.op, rounding))}({x}, {y})"
        return cg.out(dst, type_name, finish(expr, ftz, sat))
    if rounding != "rn" and type_name != "f32x2":
        mods.fail(f".{rounding} is only modelled for .f32 and .f32x2")
    if type_name == "f64":
        return cg.out(dst, type_name, _PLAIN[ins.op].format(a=x, b=y))
    if type_name == "f32x2":
        base = _WIDE[ins.op] if rounding == "rn" else _directed(ins.op, rounding)
        return cg.out(dst, type_name, f"{cg.bind(pairwise32(_flushing(base, ftz)))}({x}, {y})")
    return cg.out(
        dst, type_name, f"{cg.bind(_saturating(widened(_WIDE[ins.op], type_name), type_name, sat))}({x}, {y})"
    )


def _flushing(function: Callable, ftz: bool) -> Callable:
    if not ftz:
        return function
    return lambda *a: numeric.flush(function(*(numeric.flush(x) for x in a)))


def _saturating(function: Callable, type_name: str, sat: bool) -> Callable:
    if not sat:
        return function
    clamp = widened(numeric.saturate, type_name)
    return lambda *a: clamp(function(*a))


def _mixed(cg: Codegen, ins: Instr, mods: Mods, dst: object, args: list) -> None:
    """Emit add/sub/fma.f32.{f16,bf16}: narrow multiplicands, float32 addend."""
    narrow = mods.type("f16", "bf16")
    widen = cg.bind(from_bf16 if narrow == "bf16" else lambda v: v.astype("f4"))
    values = [f"{widen}({cg.src(v, narrow)})" for v in args[:-1]] + [cg.src(args[-1], "f32")]
    expr = f"fma32({', '.join(values)})" if len(values) == 3 else f"({_PLAIN[ins.op].format(a=values[0], b=values[1])})"
    cg.out(dst, "f32", expr)


@op("fma")
def float_fma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit fma (and floating mad)."""
    type_name = mods.type(*_TYPES)
    rounding, ftz, sat = _modifiers(mods)
    relu = mods.flag("relu")
    dst, a, b, c = mods.args(4)
    if mods.left and type_name == "f32" and mods.left[-1:] in (["f16"], ["bf16"]):
        return _mixed(cg, ins, mods, dst, [a, b, c])
    x, y, z = (cg.src(v, type_name) for v in (a, b, c))
    if type_name == "f32":
        if ftz:
            x, y, z = f"flush({x})", f"flush({y})", f"flush({z})"
        mode = "fma32" if rounding == "rn" else cg.bind(lambda p, q, r: numeric.fma_mode(p, q, r, rounding))
        return cg.out(dst, type_name, finish(f"{mode}({x}, {y}, {z})", ftz, sat))
    if type_name == "f32x2":
        base = numeric.fma32 if rounding == "rn" else _directed_fma(rounding)
        return cg.out(dst, type_name, f"{cg.bind(pairwise32(_flushing(base, ftz)))}({x}, {y}, {z})")
    if type_name == "f64":
        function: Callable = fma64
    else:
        inner = _relu_fma if relu else _odd_fma
        function = _saturating(widened(inner, type_name), type_name, sat)
    return cg.out(dst, type_name, f"{cg.bind(function)}({x}, {y}, {z})")


def _directed_fma(mode: str) -> Callable:
    return lambda a, b, c: numeric.fma_mode(a, b, c, mode)


def _odd_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b+c of narrow floats in float64, rounded to odd."""
    product = a * b
    return numeric.round_to_odd(product, c, product + c)


def _relu_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.maximum(_odd_fma(a, b, c), 0.0)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Float64 fused multiply-add through exact rationals."""
    from fractions import Fraction

    plain = a * b + c
    result = plain.copy()
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                result[i] = exact.numerator / exact.denominator
            except OverflowError:
                result[i] = np.copysign(np.inf, float(exact > 0) - 0.5)
    return result


def float_div(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit floating division; approximate forms are correctly rounded."""
    type_name = mods.type("f32", "f64")
    mods.flag("approx") or mods.flag("full")
    rounding, ftz, _ = _modifiers(mods)
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if ftz:
        x, y = f"flush({x})", f"flush({y})"
    expr = f"({x} / {y})"
    if rounding != "rn" and type_name == "f32":
        expr = f"{cg.bind(lambda p, q: numeric.div_mode(p, q, rounding))}({x}, {y})"
    cg.out(dst, type_name, finish(expr, ftz, False))


def float_minmax(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit min or max, two or three operands."""
    type_name = mods.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    ftz, nan, xor = mods.flag("ftz"), mods.flag("NaN"), mods.flag("xorsign")
    mods.flag("abs")
    if xor:
        mods.fail(".xorsign.abs is not modelled")
    dst, *args = mods.args(3, 4)
    pick = numeric.fmin if ins.op == "min" else numeric.fmax
    if nan:
        base = np.minimum if ins.op == "min" else np.maximum

        def pick(a: np.ndarray, b: np.ndarray, inner: Callable = base) -> np.ndarray:
            return inner(a, b)

    def run(*values: np.ndarray) -> np.ndarray:
        result = pick(values[0], values[1])
        return pick(result, values[2]) if len(values) > 2 else result

    function = run if type_name in ("f32", "f64") else widened(run, type_name)
    if type_name == "f32" and not nan and len(args) == 2:
        function = pick
    values = [cg.src(v, type_name) for v in args]
    if ftz and type_name == "f32":
        values = [f"flush({v})" for v in values]
    cg.out(dst, type_name, f"{cg.bind(function)}({', '.join(values)})")


_SIGN = {"f32": 0x80000000, "f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000, "f64": 1 << 63}


def float_sign(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit neg or abs as bit operations."""
    type_name = mods.type(*_SIGN)
    ftz = mods.flag("ftz")
    dst, a = mods.args(2)
    bits = TYPE_BITS[type_name]
    x = cg.src(a, type_name)
    if ftz and type_name == "f32":
        x = f"flush({x})"
    mask = _SIGN[type_name]
    constant = cg.const(mask if ins.op == "neg" else ~mask, f"u{bits // 8}")
    raw = f"({x}.view('u{bits // 8}') {'^' if ins.op == 'neg' else '&'} {constant})"
    cg.out(dst, f"b{bits}", raw)


@op("copysign")
def _copysign(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("f32", "f64")
    dst, a, b = mods.args(3)
    cg.out(dst, type_name, f"np.copysign({cg.src(b, type_name)}, {cg.src(a, type_name)})")


@op("testp")
def _testp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("f32", "f64")
    kind = mods.choose("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    dst, a = mods.args(2)
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
    }
    cg.out(dst, "pred", f"{cg.bind(tests[kind])}({cg.src(a, type_name)})")


def _log2(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.nan, np.log2(np.abs(x)))


UNARY = {
    "ex2": np.exp2,
    "lg2": _log2,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
"""Float64 definitions of the special functions; results are rounded once to the instruction's type."""


@op("ex2 lg2 rcp sqrt rsqrt sin cos tanh")
def _special(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    mods.flag("approx")
    rounding, ftz, _ = _modifiers(mods)
    dst, a = mods.args(2)
    function = UNARY[ins.op]
    x = cg.src(a, type_name)
    if type_name == "f64":
        return cg.out(dst, type_name, f"{cg.bind(function)}({x})")
    if type_name != "f32":
        return cg.out(dst, type_name, f"{cg.bind(widened(function, type_name))}({x})")
    if rounding == "rn":
        run = cg.bind(lambda v: function(v.astype("f8")).astype("f4"))
    else:
        run = cg.bind(lambda v: numeric.round_f64(function(v.astype("f8")), np.zeros(len(v)), "f4", rounding))
    if ftz:
        x = f"flush({x})"
    return cg.out(dst, type_name, finish(f"{run}({x})", ftz, False))
