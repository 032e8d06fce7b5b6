"""Emitters of type conversion: cvt, cvt.pack, and address conversion cvta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..arithmetic import native, numeric, rounding
from ..arithmetic.formats import from_bf16, halves_bf16, to_bf16, to_f16
from ..arithmetic.undefined import moved
from ..memory.spaces import GENERIC_BASE, space_of
from ..parsing.ir import TYPE_BITS, Instr
from ..translation.cfg import VIEWS
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op

_FLOATS = ("f16", "bf16", "f32", "f64")
_ROUND_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@op("cvt")
def _cvt(cg: Codegen, ins: Instr, mods: Mods) -> None:
    left = mods.left
    if "rs" in left:
        mods.fail("stochastic rounding is not modelled")
    if any(m in SMALL for m in left):
        return _cvt_small(cg, mods)
    if "ue8m0x2" in left:
        return _cvt_ue8m0(cg, ins, mods)
    if "pack" in left:
        return _cvt_pack(cg, ins, mods)
    if len([m for m in left if m in TYPE_BITS]) != 2:
        mods.fail("needs two types that the simulator knows")
    target, source = mods.first_type(), mods.type()
    if target in ("bf16x2", "f16x2"):
        return _cvt_x2(cg, mods, target, source)
    dst, a = mods.args(2)
    if target == "tf32":
        return cg.out(dst, "b32", f"{cg.bind(_tf32(mods))}({cg.src(a, 'f32')})")
    form = _Form(target, source, mods)
    name = cg.bind(form.function())
    if target in _FLOATS or source in _FLOATS or form.sat:
        return cg.out(dst, target, f"{name}({cg.src(a, source)})")
    if target == source:
        return cg.out(dst, target, cg.src(a, source))
    # Integer to integer: extend by the source's sign, or truncate.
    view, pair = VIEWS[target], cg.masked(a, source)
    return cg.bitwise(dst, target, f"{pair[0]}.astype({view!r})", moved(lambda x: x.astype(view)), [pair])


def rectify(x: np.ndarray) -> np.ndarray:
    """Clamp below at +0 (``.relu``); -0 becomes +0, NaN stays."""
    return np.where(np.signbit(x) & ~np.isnan(x), x.dtype.type(0), x)


class _Form:
    """The types and modifiers of a scalar conversion."""

    def __init__(self, target: str, source: str, mods: Mods) -> None:
        self.target, self.source = target, source
        self.ftz, self.sat, self.relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
        self.satfinite = mods.flag("satfinite")
        self.rounding = mods.choose("rn", "rz", "rm", "rp", *_ROUND_INT, default="rn")

    def load(self, x: np.ndarray) -> np.ndarray:
        """Return the source as numbers."""
        if self.source == "bf16":
            return from_bf16(x)
        return numeric.flush(x) if self.ftz and self.source == "f32" else x

    def function(self) -> Callable:
        """Return the array function of the conversion."""
        if self.target in _FLOATS:
            return self.to_float
        if self.source in _FLOATS:
            return self.to_int
        return lambda x: _clamp_int(x, self.target)

    def to_float(self, raw: np.ndarray) -> np.ndarray:
        """Convert to a floating-point type."""
        x = self.load(raw)
        if self.rounding in _ROUND_INT:
            x = _ROUND_INT[self.rounding](x)
        if self.relu:
            x = rectify(x)
        if self.sat:
            x = numeric.saturate(x)
        mode = self.rounding if self.rounding in rounding.DIRECTED else "rn"
        if self.target == "f32" and mode == "rn":
            result = x.astype("f4")
        else:
            result = rounding.narrow(*rounding.exact_pair(x), self.target, mode)
        if self.satfinite:
            result = rounding.saturated(result, self.target)
        return numeric.flush(result) if self.ftz and self.target == "f32" else result

    def to_int(self, raw: np.ndarray) -> np.ndarray:
        """Convert to an integer; NaN gives 0, or only the highest bit from .f64 or to 64 bits (ISA: cvt)."""
        x = self.load(raw).astype("f8")
        wide = self.source == "f64" or TYPE_BITS[self.target] == 64
        nan = 1 << (TYPE_BITS[self.target] - 1) if wide else 0
        return _float_to_int(x, self.target, self.rounding if self.rounding in _ROUND_INT else "rzi", nan)


def _float_to_int(x: np.ndarray, target: str, rounding_mode: str, nan: int) -> np.ndarray:
    """Round and clamp float64 to an integer type; ``nan`` are the bits that NaN gives."""
    whole = _ROUND_INT[rounding_mode](x)
    info = np.iinfo(VIEWS[target])
    bad = np.isnan(whole)
    low, high = whole <= info.min, whole >= info.max
    result = np.where(bad | low | high, 0, whole).astype(VIEWS[target])
    result = np.where(low & ~bad, info.min, result)
    result = np.where(high & ~bad, info.max, result).astype(VIEWS[target])
    return np.where(bad, numeric.from_bits(nan, VIEWS[target]), result)


def _clamp_int(x: np.ndarray, target: str) -> np.ndarray:
    info = np.iinfo(VIEWS[target])
    values = [min(max(int(v), info.min), info.max) for v in x]
    return np.array(values, dtype=VIEWS[target])


def _tf32(mods: Mods) -> Callable:
    """Return the rounding to 10 fraction bits."""
    mode = mods.choose("rna", "rn", "rz")
    relu, satfinite = mods.flag("relu"), mods.flag("satfinite")

    def run(x: np.ndarray) -> np.ndarray:
        if relu:
            x = rectify(x)
        bits = x.view("u4")
        even = np.uint32(0xFFF) + (bits >> np.uint32(13) & 1)
        step = {"rna": np.uint32(0x1000), "rn": even, "rz": np.uint32(0)}[mode]
        result = (bits + step) & np.uint32(0xFFFFE000)
        if satfinite:
            over = (result & 0x7FFFFFFF) >= 0x7F800000
            result = np.where(over, (result & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), result)
        result = np.where(np.isinf(x) & np.bool_(not satfinite), bits, result)
        return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), result).astype("u4")

    return run


def _cvt_x2(cg: Codegen, mods: Mods, target: str, source: str) -> None:
    """Emit ``cvt.rn.{bf16x2,f16x2}.f32 d, a, b``: a goes to the high half."""
    mode = mods.choose("rn", "rz")
    relu, sat = mods.flag("relu"), mods.flag("satfinite")
    if source != "f32":
        mods.fail("the packed form converts from .f32")
    dst, a, b = mods.args(3)
    kind = target[:-2]

    def half(x: np.ndarray) -> np.ndarray:
        if relu:
            x = rectify(x)
        if mode == "rn" and not sat:
            return native.FUNCTIONS["to_bf16"](x) if kind == "bf16" else to_f16(x).view("u2")
        result = rounding.narrow(*rounding.exact_pair(x), kind, mode)
        result = rounding.saturated(result, kind) if sat else result
        return np.ascontiguousarray(result).view("u2")

    def run(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return half(high).astype("u4") << np.uint32(16) | half(low)

    cg.out(dst, target, f"{cg.bind(run)}({cg.src(a, 'f32')}, {cg.src(b, 'f32')})")


@dataclass(frozen=True)
class Small:
    """A packed pair of small floats: bits of exponent and fraction, bias, largest value, bits in a container."""

    exponent: int
    fraction: int
    bias: int
    largest: float
    container: int = 8

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Round to nearest even and saturate; NaN becomes 0x7f in 8 bits and the largest value in fewer."""
        bits = self.exponent + self.fraction
        values = self.decode(np.arange(1 << bits)).astype("f8")
        values = values[values <= self.largest]
        ties = (values[1:] + values[:-1]) / 2
        magnitude = np.abs(np.where(np.isnan(x), np.inf, x).astype("f8"))
        code = np.searchsorted(ties, magnitude)
        code = code + ((code & 1 == 1) & np.isin(magnitude, ties))
        code = np.where(np.isnan(x), 0x7F if bits == 7 else len(values) - 1, code | np.signbit(x).astype("i8") << bits)
        return code.astype("u1")

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the values of codes as float32 (as if the type had no NaN or infinity)."""
        bits = self.exponent + self.fraction
        body = (codes & ((1 << bits) - 1)).astype("i8")
        power, fraction = body >> self.fraction, body & ((1 << self.fraction) - 1)
        value = np.where(
            power > 0,
            np.ldexp(1.0 + fraction / 2.0**self.fraction, power - self.bias),
            np.ldexp(fraction / 2.0**self.fraction, 1 - self.bias),
        )
        return np.where(codes >> bits & 1, -value, value).astype("f4")


SMALL = {
    "e4m3x2": Small(4, 3, 7, 448.0),
    "e5m2x2": Small(5, 2, 15, 57344.0),
    "e2m3x2": Small(2, 3, 1, 7.5),
    "e3m2x2": Small(3, 2, 3, 28.0),
    "e2m1x2": Small(2, 1, 1, 6.0, 4),
}
_WIDE8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}


def _cvt_small(cg: Codegen, mods: Mods) -> None:
    """Emit conversions to and from pairs of 8-, 6- and 4-bit floats."""
    name = next(m for m in mods.left if m in SMALL)
    to_small = mods.left.index(name) < len(mods.left) - 1
    mods.flag(name)
    mods.choose("rn")
    relu = mods.flag("relu")
    form = SMALL[name]
    holder = "b8" if form.container == 4 else "b16"
    if to_small:
        mods.choose("satfinite")
        source = mods.type("f32", "f16x2")
        return _to_small(cg, mods, form, source, relu, holder)
    mods.type("f16x2")
    dst, a = mods.args(2)

    def widen(x: np.ndarray) -> np.ndarray:
        if form.container == 4:
            pair = form.decode(np.stack([x & 15, x >> 4], 1).reshape(-1))
        else:
            codes = np.ascontiguousarray(x).view("u1")
            pair = codes.view(_WIDE8[name]).astype("f4") if name in _WIDE8 else form.decode(codes)
        pair = rectify(pair) if relu else pair
        return to_f16(pair).view("u4")

    return cg.out(dst, "f16x2", f"{cg.bind(widen)}({cg.src(a, holder)})")


def _to_small(cg: Codegen, mods: Mods, form: Small, source: str, relu: bool, holder: str) -> None:
    dst, *args = mods.args(3 if source == "f32" else 2)

    def encode(x: np.ndarray) -> np.ndarray:
        return form.encode(rectify(x) if relu else x)

    def from_f32(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        code = "u1" if holder == "b8" else "u2"
        return encode(high).astype(code) << form.container | encode(low)

    def from_f16x2(x: np.ndarray) -> np.ndarray:
        pair = np.ascontiguousarray(x).view("f2").reshape(-1, 2).astype("f4")
        return from_f32(pair[:, 1], pair[:, 0])

    values = ", ".join(cg.src(v, source) for v in args)
    cg.out(dst, holder, f"{cg.bind(from_f32 if source == 'f32' else from_f16x2)}({values})")


def to_ue8m0(x: np.ndarray, up: bool, saturate: bool) -> np.ndarray:
    """Round the magnitude of float32 to a power of two, as a biased exponent byte; NaN (and overflow) is 0xff."""
    bits = x.view("u4") & np.uint32(0x7FFFFFFF)
    exponent = bits >> np.uint32(23)
    if up:
        fraction = bits & np.uint32(0x7FFFFF)
        exponent = exponent + np.where(exponent == 0, fraction > 0x400000, fraction != 0)
    return np.where(np.isnan(x), 255, np.minimum(exponent, 254 if saturate else 255)).astype("u1")


def from_ue8m0(x: np.ndarray) -> np.ndarray:
    """Return the float32 value of exponent bytes."""
    return np.where(x == 255, np.float32(np.nan), np.ldexp(np.float32(1), x.astype("i4") - 127)).astype("f4")


def _cvt_ue8m0(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit conversions between pairs of float32 or bf16 and ue8m0x2."""
    if mods.left[-1] == "ue8m0x2":
        mods.choose("rn")
        mods.flag("ue8m0x2")
        mods.choose("bf16x2")
        dst, a = mods.args(2)

        def widen(x: np.ndarray) -> np.ndarray:
            pair = to_bf16(from_ue8m0(np.ascontiguousarray(x).view("u1")))
            return pair.view("u4")

        return cg.out(dst, "bf16x2", f"{cg.bind(widen)}({cg.src(a, 'b16')})")
    up, saturate = mods.choose("rz", "rp") == "rp", mods.flag("satfinite")
    mods.flag("ue8m0x2")
    if mods.flag("bf16x2"):
        dst, a = mods.args(2)

        def narrow(x: np.ndarray) -> np.ndarray:
            low, high = halves_bf16(x)
            return to_ue8m0(high, up, saturate).astype("u2") << np.uint16(8) | to_ue8m0(low, up, saturate)

        return cg.out(dst, "b16", f"{cg.bind(narrow)}({cg.src(a, 'bf16x2')})")
    mods.choose("f32")
    dst, a, b = mods.args(3)

    def run(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return to_ue8m0(high, up, saturate).astype("u2") << np.uint16(8) | to_ue8m0(low, up, saturate)

    return cg.out(dst, "b16", f"{cg.bind(run)}({cg.src(a, 'f32')}, {cg.src(b, 'f32')})")


def _cvt_pack(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit ``cvt.pack.sat.{u16,s16}.s32`` and ``cvt.pack.sat.{u8,s8,u4,s4,u2,s2}.s32.b32``."""
    mods.flag("pack")
    mods.choose("sat")
    target = mods.choose(*(f"{sign}{bits}" for bits in (16, 8, 4, 2) for sign in "us"))
    merge = mods.flag("b32")
    mods.type("s32")
    dst, a, b, *rest = mods.args(4 if merge else 3)
    bits = int(target[1:])
    low, high = (0, (1 << bits) - 1) if target[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)

    def run(x: np.ndarray, y: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        mask = np.uint32((1 << bits) - 1)
        first, second = (np.clip(v.astype("i8"), low, high).astype("u4") & mask for v in (x, y))
        pair = first << np.uint32(bits) | second
        return pair if c is None else c << np.uint32(2 * bits) | pair

    values = [cg.src(a, "s32"), cg.src(b, "s32")] + [cg.src(v, "b32") for v in rest]
    cg.out(dst, "b32", f"{cg.bind(run)}({', '.join(values)})")


@op("cvta")
def _cvta(cg: Codegen, ins: Instr, mods: Mods) -> None:
    to_space = mods.flag("to")
    space = mods.choose("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    type_name = mods.type("u64", "u32")
    dst, a = mods.args(2)
    base = space_base(space)
    x = cg.src(a, "u64" if type_name == "u64" else type_name)
    if not base:
        return cg.out(dst, type_name, x)
    sign = "-" if to_space else "+"
    return cg.out(dst, type_name, f"{x} {sign} {cg.const(base, VIEWS[type_name])}")


def space_base(space: str) -> int:
    """Return where a state space lies in the generic address space."""
    return GENERIC_BASE[space.split("::")[0]]


@op("isspacep")
def _isspacep(cg: Codegen, ins: Instr, mods: Mods) -> None:
    space = mods.choose("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    dst, a = mods.args(2)

    def run(x: np.ndarray) -> np.ndarray:
        return np.array([space_of(int(v)) == space.split("::")[0] for v in x])

    cg.out(dst, "pred", f"{cg.bind(run)}({cg.src(a, 'u64')})")
