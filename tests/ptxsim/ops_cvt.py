"""Emitters of type conversion: cvt, cvt.pack, and address conversion cvta."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from . import numeric
from .cfg import VIEWS
from .codegen import Codegen
from .ir import TYPE_BITS, Instr
from .ops_float import from_bf16, to_bf16, to_f16
from .registry import Mods, op

_FLOATS = ("f16", "bf16", "f32", "f64")
_ROUND_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FP8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
_FP8_MAX = {"e4m3x2": 448.0, "e5m2x2": 57344.0}


@op("cvt")
def _cvt(cg: Codegen, ins: Instr, mods: Mods) -> None:
    left = mods.left
    if any(m in _FP8 for m in left):
        return _cvt_fp8(cg, ins, mods)
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
    ftz, sat, relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    if target == "tf32":
        mods.choose("rna", "rn", "rz")
        return cg.out(dst, "b32", f"{cg.bind(_to_tf32)}({cg.src(a, 'f32')})")
    rounding = mods.choose("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", default="")
    function = _conversion(target, source, rounding, ftz, sat, relu)
    name = cg.bind(function)
    if target in _FLOATS or source in _FLOATS or sat:
        return cg.out(dst, target, f"{name}({cg.src(a, source)})")
    if target == source:
        return cg.out(dst, target, cg.src(a, source))
    # Integer to integer: extend by the source's sign, or truncate.
    return cg.out(dst, target, f"{cg.src(a, source)}.astype({VIEWS[target]!r})")


def _conversion(target: str, source: str, rounding: str, ftz: bool, sat: bool, relu: bool) -> Callable:
    """Return the array function of one conversion pair."""

    def load(x: np.ndarray) -> np.ndarray:
        if source == "bf16":
            return from_bf16(x)
        return numeric.flush(x) if ftz and source == "f32" else x

    if target in _FLOATS:
        return lambda x: _to_float(load(x), target, source, rounding, ftz, sat, relu)
    if source in _FLOATS:
        return lambda x: _float_to_int(load(x).astype("f8"), target, rounding or "rzi")
    return lambda x: _clamp_int(x, target)


def _to_float(x: np.ndarray, target: str, source: str, rounding: str, ftz: bool, sat: bool, relu: bool) -> np.ndarray:
    if rounding in _ROUND_INT:
        x = _ROUND_INT[rounding](x)
    if relu:
        x = np.where(x < 0, x.dtype.type(0), x)
    if sat:
        x = numeric.saturate(x)
    if target == "bf16":
        if rounding == "rz":
            return _chopped_bf16(x)
        return to_bf16(x)
    if target == "f16":
        return _directed_half(x, rounding) if rounding in ("rz", "rm", "rp") else to_f16(x)
    if target == "f32" and rounding in ("rz", "rm", "rp"):
        if x.dtype.kind in "iu" and x.itemsize == 8:
            wide = x.astype(np.longdouble)
            high = x.astype("f8")
            return numeric.round_f64(high, (wide - high).astype("f8"), "f4", rounding)
        return numeric.round_f64(x.astype("f8"), np.zeros(len(x)), "f4", rounding)
    result = x.astype(VIEWS[target])
    return numeric.flush(result) if ftz and target == "f32" else result


def _chopped_bf16(x: np.ndarray) -> np.ndarray:
    """Toward zero; NaN becomes the canonical one, as on an H200."""
    bits = (x.astype("f4").view("u4") >> np.uint32(16)).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def _directed_half(x: np.ndarray, rounding: str) -> np.ndarray:
    return numeric.round_f64(x.astype("f8"), np.zeros(len(x)), "f2", rounding)


def _float_to_int(x: np.ndarray, target: str, rounding: str) -> np.ndarray:
    """Round and clamp; NaN gives 0 (PTX: for .s64/.u64 and 32-bit types alike on sm_90)."""
    whole = _ROUND_INT[rounding](x)
    info = np.iinfo(VIEWS[target])
    bad = np.isnan(whole)
    low, high = whole <= info.min, whole >= info.max
    result = np.where(bad | low | high, 0, whole).astype(VIEWS[target])
    result = np.where(low & ~bad, info.min, result)
    return np.where(high & ~bad, info.max, result).astype(VIEWS[target])


def _clamp_int(x: np.ndarray, target: str) -> np.ndarray:
    info = np.iinfo(VIEWS[target])
    values = [min(max(int(v), info.min), info.max) for v in x]
    return np.array(values, dtype=VIEWS[target])


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties away, at 10 fraction bits."""
    return (x.view("u4") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def _cvt_x2(cg: Codegen, mods: Mods, target: str, source: str) -> None:
    """Emit ``cvt.rn.{bf16x2,f16x2}.f32 d, a, b``: a goes to the high half."""
    if source in _FP8:
        mods.fail("unreachable")
    rounding = mods.choose("rn", "rz")
    relu, sat = mods.flag("relu"), mods.flag("satfinite")
    if source != "f32":
        mods.fail("the packed form converts from .f32")
    dst, a, b = mods.args(3)
    limit = 65504.0 if target == "f16x2" else 3.3895313892515355e38

    def half(x: np.ndarray) -> np.ndarray:
        if relu:
            x = np.where(x < 0, np.float32(0), x)
        if sat:
            x = np.clip(x, np.float32(-limit), np.float32(limit))
        if target == "bf16x2":
            return to_bf16(x) if rounding == "rn" else _chopped_bf16(x)
        return (to_f16(x) if rounding == "rn" else _directed_half(x, "rz")).view("u2")

    def run(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return half(high).astype("u4") << np.uint32(16) | half(low)

    cg.out(dst, target, f"{cg.bind(run)}({cg.src(a, 'f32')}, {cg.src(b, 'f32')})")


def to_fp8(x: np.ndarray, name: str, relu: bool = False) -> np.ndarray:
    """Round float32 to an 8-bit float with .satfinite; NaN becomes 0x7f."""
    if relu:
        x = np.where(x < 0, np.float32(0), x)
    limit = np.float32(_FP8_MAX[name])
    bits = np.clip(x, -limit, limit).astype(_FP8[name]).view("u1")
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def _cvt_fp8(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit conversions to and from e4m3x2 and e5m2x2."""
    name = next(m for m in mods.left if m in _FP8)
    to_narrow = mods.left.index(name) < len(mods.left) - 1
    mods.flag(name)
    mods.choose("rn")
    relu = mods.flag("relu")
    if to_narrow:
        mods.choose("satfinite")
        source = mods.type("f32", "f16x2")
        return _to_fp8(cg, mods, name, source, relu)
    mods.type("f16x2")
    dst, a = mods.args(2)

    def widen(x: np.ndarray) -> np.ndarray:
        pair = np.ascontiguousarray(x).view("u1").view(_FP8[name]).astype("f4")
        pair = np.maximum(pair, np.float32(0)) if relu else pair
        return to_f16(pair).view("u4")

    return cg.out(dst, "f16x2", f"{cg.bind(widen)}({cg.src(a, 'b16')})")


def _to_fp8(cg: Codegen, mods: Mods, name: str, source: str, relu: bool) -> None:
    dst, *args = mods.args(3 if source == "f32" else 2)

    def from_f32(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return to_fp8(high, name, relu).astype("u2") << np.uint16(8) | to_fp8(low, name, relu)

    def from_f16x2(x: np.ndarray) -> np.ndarray:
        pair = np.ascontiguousarray(x).view("f2").reshape(-1, 2).astype("f4")
        return from_f32(pair[:, 1], pair[:, 0])

    values = ", ".join(cg.src(v, source) for v in args)
    cg.out(dst, "b16", f"{cg.bind(from_f32 if source == 'f32' else from_f16x2)}({values})")


def to_ue8m0(x: np.ndarray, up: bool) -> np.ndarray:
    """Round the magnitude of float32 to a power of two, as a biased exponent byte; NaN is 0xff, infinity 0xfe."""
    bits = x.view("u4") & np.uint32(0x7FFFFFFF)
    exponent = bits >> np.uint32(23)
    if up:
        fraction = bits & np.uint32(0x7FFFFF)
        exponent = exponent + np.where(exponent == 0, fraction > 0x400000, fraction != 0)
    return np.where(np.isnan(x), 255, np.minimum(exponent, 254)).astype("u1")


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
    up = mods.choose("rz", "rp") == "rp"
    mods.flag("satfinite")
    mods.flag("ue8m0x2")
    mods.choose("f32")
    dst, a, b = mods.args(3)

    def run(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return to_ue8m0(high, up).astype("u2") << np.uint16(8) | to_ue8m0(low, up)

    return cg.out(dst, "b16", f"{cg.bind(run)}({cg.src(a, 'f32')}, {cg.src(b, 'f32')})")


def _cvt_pack(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit ``cvt.pack.sat.{u16,s16,u8,s8}.s32[.b32]``."""
    mods.flag("pack")
    mods.choose("sat")
    target = mods.first_type()
    mods.type("s32") if mods.left.count("b32") == 0 else (mods.flag("b32"), mods.type("s32"))
    dst, a, b, *rest = mods.args(3, 4)
    bits = TYPE_BITS[target]

    def run(x: np.ndarray, y: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        mask = np.uint32((1 << bits) - 1)
        first, second = (_clamp_int(v, target).astype("i8").astype("u4") & mask for v in (x, y))
        low = first << np.uint32(bits) | second
        return low if c is None else c << np.uint32(2 * bits) | low

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
    from .memory import GENERIC_BASE

    return GENERIC_BASE[space.split("::")[0]]


@op("isspacep")
def _isspacep(cg: Codegen, ins: Instr, mods: Mods) -> None:
    from .memory import space_of

    space = mods.choose("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    dst, a = mods.args(2)

    def run(x: np.ndarray) -> np.ndarray:
        return np.array([space_of(int(v)) == space.split("::")[0] for v in x])

    cg.out(dst, "pred", f"{cg.bind(run)}({cg.src(a, 'u64')})")
