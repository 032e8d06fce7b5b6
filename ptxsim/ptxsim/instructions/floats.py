"""Emitters of floating-point arithmetic: f32, f64, f16, bf16 and their packed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..arithmetic import native, numeric
from ..arithmetic.formats import flush_half, from_bf16, halves_bf16, to_bf16, to_f16
from ..arithmetic.rounding import arithmetic64, sqrt64
from ..parsing.ir import TYPE_BITS, Instr
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op

_TYPES = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp")


def widened(function: Callable, type_name: str, ftz: bool = False) -> Callable:
    """Return ``function`` (written for float64 arrays) for arrays of a 16-bit or packed type."""
    flush = flush_half if ftz else _same
    if type_name == "f16":
        return lambda *a: flush(to_f16(function(*(flush(x.astype("f8")) for x in a))))
    if type_name == "bf16":
        tiny = _flush_brain if ftz else _same
        return lambda *a: tiny(to_bf16(function(*(from_bf16(tiny(x)).astype("f8") for x in a))))
    if type_name == "f16x2":

        def run_f16x2(*args: np.ndarray) -> np.ndarray:
            wide = [flush(np.ascontiguousarray(x).view("f2").astype("f8")) for x in args]
            return flush(to_f16(function(*wide))).view("u4")

        return run_f16x2
    if type_name == "bf16x2":

        def run_bf16x2(*args: np.ndarray) -> np.ndarray:
            low, high = zip(*(halves_bf16(x) for x in args), strict=False)
            narrow = numeric.flush if ftz else _same
            parts = [to_bf16(function(*(narrow(x).astype("f8") for x in side))) for side in (low, high)]
            parts = [_flush_brain(part) for part in parts] if ftz else parts
            return parts[0].astype("u4") | parts[1].astype("u4") << np.uint32(16)

        return run_bf16x2
    raise AssertionError(type_name)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _flush_brain(bits: np.ndarray) -> np.ndarray:
    """Flush bf16 subnormals, given as bits, to zero."""
    return np.where(bits & 0x7F80 == 0, bits & np.uint16(0x8000), bits)


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
    """Return add, sub or mul of float32 in a directed rounding mode."""
    if name == "mul":
        return lambda a, b: numeric.mul_mode(a, b, mode)

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        b = -b if name == "sub" else b
        total = numeric.add_mode(a, b, mode)
        return _negative_zero(total, (a, b)) if mode == "rm" else total

    return add


def _negative_zero(total: np.ndarray, terms: tuple[np.ndarray, ...]) -> np.ndarray:
    """Make an exact zero sum negative, as rounding down does, unless all terms are +0."""
    return np.where((total == 0) & np.logical_or.reduce([np.signbit(t) for t in terms]), -total.dtype.type(0), total)


def _fma_mode(mode: str) -> Callable:
    """Return the fused multiply-add of float32 in a mode."""
    if mode == "rn":
        return native.FUNCTIONS["fma32"]

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        total = numeric.fma_mode(a, b, c, mode)
        exact_zero = (total == 0) & (a.astype("f8") * b + c == 0)
        signed = _negative_zero(total, (a * b, c)) if mode == "rm" else total
        return np.where(exact_zero, signed, total)

    return run


def float_binary(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit add, sub or mul."""
    if _is_mixed(mods):
        return _mixed(cg, ins, mods)
    type_name = mods.type(*_TYPES)
    rounding, ftz, sat = _modifiers(mods)
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if type_name == "f32":
        if ftz:
            x, y = f"flush({x})", f"flush({y})"
        if rounding == "rn":
            expr = f"({_PLAIN[ins.op].format(a=x, b=y)})"
        else:
            expr = f"{cg.bind(_directed(ins.op, rounding))}({x}, {y})"
        return cg.out(dst, type_name, finish(expr, ftz, sat))
    if type_name == "f64":
        if rounding == "rn":
            return cg.out(dst, type_name, _PLAIN[ins.op].format(a=x, b=y))
        return cg.out(dst, type_name, f"{cg.bind(partial(arithmetic64, ins.op, rounding))}({x}, {y})")
    if type_name == "f32x2":
        base = _WIDE[ins.op] if rounding == "rn" else _directed(ins.op, rounding)
        return cg.out(dst, type_name, f"{cg.bind(pairwise32(_flushing(base, ftz)))}({x}, {y})")
    if rounding != "rn":
        mods.fail(f".{rounding} needs .f32, .f64 or .f32x2")
    function = _saturating(widened(_WIDE[ins.op], type_name, ftz), type_name, sat)
    return cg.out(dst, type_name, f"{cg.bind(function)}({x}, {y})")


def _flushing(function: Callable, ftz: bool) -> Callable:
    if not ftz:
        return function
    return lambda *a: numeric.flush(function(*(numeric.flush(x) for x in a)))


def _saturating(function: Callable, type_name: str, sat: bool) -> Callable:
    if not sat:
        return function
    clamp = widened(numeric.saturate, type_name)
    return lambda *a: clamp(function(*a))


def _is_mixed(mods: Mods) -> bool:
    """Tell whether the last two types are .f32 and a 16-bit one."""
    types = [m for m in mods.left if m in TYPE_BITS]
    return len(types) == 2 and types[0] == "f32" and types[1] in ("f16", "bf16")


def _mixed(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit add, sub and fma of .f32.{f16,bf16}: narrow first operands (both factors), the last one float32."""
    narrow = mods.type("f16", "bf16")
    mods.type("f32")
    mode, _, sat = _modifiers(mods)
    dst, *args = mods.args(4 if ins.op == "fma" else 3)
    widen = cg.bind(from_bf16 if narrow == "bf16" else lambda v: v.astype("f4"))
    values = [f"{widen}({cg.src(v, narrow)})" for v in args[:-1]] + [cg.src(args[-1], "f32")]
    function = _fma_mode(mode) if ins.op == "fma" else _WIDE[ins.op] if mode == "rn" else _directed(ins.op, mode)
    cg.out(dst, "f32", finish(f"{cg.bind(function)}({', '.join(values)})", False, sat))


@op("fma")
def float_fma(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit fma (and floating mad)."""
    if _is_mixed(mods):
        return _mixed(cg, ins, mods)
    type_name = mods.type(*_TYPES)
    rounding, ftz, sat = _modifiers(mods)
    relu, oob = mods.flag("relu"), mods.flag("oob")
    dst, a, b, c = mods.args(4)
    x, y, z = (cg.src(v, type_name) for v in (a, b, c))
    if type_name == "f32":
        if ftz:
            x, y, z = f"flush({x})", f"flush({y})", f"flush({z})"
        mode = "fma32" if rounding == "rn" else cg.bind(_fma_mode(rounding))
        return cg.out(dst, type_name, finish(f"{mode}({x}, {y}, {z})", ftz, sat))
    if type_name == "f32x2":
        function = pairwise32(_flushing(_fma_mode(rounding), ftz))
    elif type_name == "f64":
        function = partial(arithmetic64, "fma", rounding)
    else:
        inner = _relu_fma if relu else _odd_fma
        function = _saturating(widened(inner, type_name, ftz), type_name, sat)
        function = _without_oob(function, type_name) if oob else function
    return cg.out(dst, type_name, f"{cg.bind(function)}({x}, {y}, {z})")


OOB_NAN = 0x7FF7
"""The 16-bit pattern of out-of-bounds NaN, as an H200 fills it; the sign does not matter, as found there too."""


def _without_oob(function: Callable, type_name: str) -> Callable:
    """Make the result zero where a factor is the NaN with which tensor copies fill elements out of bounds."""

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        raw = function(a, b, c)
        result, *factors = (np.ascontiguousarray(v).view("u2") for v in (raw, a, b))
        hit = np.logical_or(*((x & 0x7FFF) == OOB_NAN for x in factors))
        return np.where(hit, np.uint16(0), result).view(raw.dtype)

    return run


def _odd_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a*b+c of narrow floats in float64, rounded to odd."""
    product = a * b
    return numeric.round_to_odd(product, c, product + c)


def _relu_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.maximum(_odd_fma(a, b, c), 0.0)


def _approximate_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide as div.approx: divisors above 2**126 give zero, or NaN below infinity."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b) & ~np.isnan(a)
    odd = np.where(np.isinf(a), np.float32(np.nan), np.copysign(np.float32(0), a) * np.copysign(np.float32(1), b))
    return np.where(huge, odd, a / b)


def float_div(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit floating division; approximate forms are correctly rounded."""
    type_name = mods.type("f32", "f64")
    approximate = mods.flag("approx")
    mods.flag("full")
    rounding, ftz, _ = _modifiers(mods)
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if ftz:
        x, y = f"flush({x})", f"flush({y})"
    expr = f"{cg.bind(_approximate_quotient)}({x}, {y})" if approximate else f"({x} / {y})"
    if rounding != "rn":
        function = partial(arithmetic64, "div", rounding)
        if type_name == "f32":
            function = partial(numeric.div_mode, mode=rounding)
        expr = f"{cg.bind(function)}({x}, {y})"
    cg.out(dst, type_name, finish(expr, ftz, False))


def float_minmax(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit min or max, two or three operands."""
    type_name = mods.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    ftz, nan, xor, absolute = (mods.flag(name) for name in ("ftz", "NaN", "xorsign", "abs"))
    dst, *args = mods.args(3, 4)
    if xor and (len(args) != 2 or not absolute):
        mods.fail(".xorsign needs .abs and two sources")
    pick = numeric.fmin if ins.op == "min" else numeric.fmax
    if type_name == "f32":
        pick = native.FUNCTIONS[f"f{ins.op}32"]
    function: Callable = pick
    if nan or absolute or len(args) > 2:

        def function(*values: np.ndarray) -> np.ndarray:
            sizes = [np.abs(v) if absolute else v for v in values]
            result = sizes[0]
            for each in sizes[1:]:
                result = pick(result, each)
            if xor:
                sign = np.signbit(values[0]) ^ np.signbit(values[1])
                result = np.where(sign & ~np.isnan(result), -result, result)
            if nan:
                bad = np.logical_or.reduce([np.isnan(v) for v in values])
                result = np.where(bad, result.dtype.type(np.nan), result)
            return result

    if type_name not in ("f32", "f64"):
        function = widened(function, type_name, ftz)
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
    elif ftz:
        x = f"{cg.bind(widened(_same, type_name, True))}({x})"
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
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= np.finfo(x.dtype).tiny) | (x == 0)),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
    }
    cg.out(dst, "pred", f"{cg.bind(tests[kind])}({cg.src(a, type_name)})")


def _log2(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.nan, np.log2(np.abs(x)))


UNARY: dict[str, Callable] = {
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
    approximate = mods.flag("approx")
    rounding, ftz, _ = _modifiers(mods)
    dst, a = mods.args(2)
    function = UNARY[ins.op]
    x = cg.src(a, type_name)
    if type_name == "f64":
        return cg.out(dst, type_name, f"{cg.bind(_special64(ins.op, rounding, approximate and ftz))}({x})")
    if type_name != "f32":
        return cg.out(dst, type_name, f"{cg.bind(widened(function, type_name, ftz))}({x})")
    if rounding == "rn":
        run = cg.bind(lambda v: function(v.astype("f8")).astype("f4"))
    else:
        run = cg.bind(lambda v: numeric.round_f64(function(v.astype("f8")), np.zeros(len(v)), "f4", rounding))
    if ftz:
        x = f"flush({x})"
    return cg.out(dst, type_name, finish(f"{run}({x})", ftz, False))


def _special64(name: str, mode: str, gross: bool) -> Callable:
    """Return a float64 function; the gross approximations read and make only the upper 32 bits, without subnormals."""
    if name == "sqrt":
        return partial(sqrt64, mode=mode)
    if name == "rcp" and not gross:
        return lambda x: arithmetic64("div", mode, np.ones_like(x), x)
    if not gross:
        return UNARY[name]

    def upper(x: np.ndarray) -> np.ndarray:
        cut = (x.view("u8") & np.uint64(0xFFFFFFFF00000000)).view("f8")
        return np.where(np.abs(cut) < 2.0**-1022, np.copysign(0.0, cut), cut)

    return lambda x: upper(UNARY[name](upper(x)))
