"""Emitters of integer, logic, comparison and move instructions."""

from __future__ import annotations

import numpy as np

from . import numeric
from .cfg import VIEWS
from .codegen import Codegen
from .ir import SINK, TYPE_BITS, Imm, Instr, Pair, Vec
from .registry import Mods, op, unknown

_INT = ("u16", "u32", "u64", "s16", "s32", "s64")
_FLOAT = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_PACKED_INT = ("u16x2", "s16x2")


def lanes16(x: np.ndarray, view: str) -> np.ndarray:
    """See packed 32-bit elements as pairs of 16-bit elements."""
    return np.ascontiguousarray(x).view(view)


def packed(function: object, view: str) -> object:
    """Return a function on packed 32-bit arrays that applies ``function`` to their 16-bit halves."""

    def apply(*args: np.ndarray) -> np.ndarray:
        return np.asarray(function(*(lanes16(a, view) for a in args))).astype(view, copy=False).view("u4")

    return apply


def binary(cg: Codegen, ins: Instr, mods: Mods, type_name: str, template: str) -> None:
    """Emit ``d = template(a, b)`` for one type."""
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    cg.out(dst, type_name, template.format(a=x, b=y))


def _packed_int(cg: Codegen, mods: Mods, function: object) -> bool:
    if not any(m in _PACKED_INT for m in mods.left):
        return False
    type_name = mods.type(*_PACKED_INT)
    name = cg.bind(packed(function, "i2" if type_name[0] == "s" else "u2"))
    dst, a, b = mods.args(3)
    cg.out(dst, type_name, f"{name}({cg.src(a, type_name)}, {cg.src(b, type_name)})")
    return True


@op("add sub")
def _add(cg: Codegen, ins: Instr, mods: Mods) -> None:
    sign = "+" if ins.op == "add" else "-"
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_binary

        return float_binary(cg, ins, mods)
    if _packed_int(cg, mods, np.add if sign == "+" else np.subtract):
        return None
    type_name = mods.type(*_INT)
    if mods.flag("sat"):
        if type_name != "s32":
            mods.fail(".sat needs .s32")
        name = cg.bind(lambda a, b, s=1 if sign == "+" else -1: numeric.saturating_add(a, b, s))
        return binary(cg, ins, mods, type_name, name + "({a}, {b})")
    return binary(cg, ins, mods, "u" + type_name[1:], "{a} " + sign + " {b}")


@op("mul")
def _mul(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_binary

        return float_binary(cg, ins, mods)
    type_name = mods.type(*_INT)
    part = mods.choose("lo", "hi", "wide")
    if part == "lo":
        return binary(cg, ins, mods, "u" + type_name[1:], "{a} * {b}")
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if part == "hi":
        return cg.out(dst, type_name, f"mul_hi({x}, {y})")
    if TYPE_BITS[type_name] > 32:
        mods.fail(".wide needs a 16- or 32-bit type")
    wide = f"{type_name[0]}{TYPE_BITS[type_name] * 2}"
    return cg.out(dst, wide, f"{x}.astype({VIEWS[wide]!r}) * {y}")


@op("mad")
def _mad(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_fma

        return float_fma(cg, ins, mods)
    type_name = mods.type(*_INT)
    part = mods.choose("lo", "hi", "wide")
    dst, a, b, c = mods.args(4)
    if part == "lo":
        unsigned = "u" + type_name[1:]
        x, y, z = (cg.src(v, unsigned) for v in (a, b, c))
        return cg.out(dst, unsigned, f"{x} * {y} + {z}")
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if part == "hi":
        return cg.out(dst, type_name, f"mul_hi({x}, {y}) + {cg.src(c, type_name)}")
    wide = f"{type_name[0]}{TYPE_BITS[type_name] * 2}"
    return cg.out(dst, wide, f"{x}.astype({VIEWS[wide]!r}) * {y} + {cg.src(c, wide)}")


def add_carry(a: np.ndarray, b: np.ndarray, carry: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return sum and carry out of unsigned addition."""
    total = a + b
    out = total < a
    if carry is not None:
        more = total + carry.astype(a.dtype)
        out, total = out | (more < total), more
    return total, out


def sub_borrow(a: np.ndarray, b: np.ndarray, borrow: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return difference and borrow out of unsigned subtraction."""
    difference = a - b
    out = a < b
    if borrow is not None:
        less = difference - borrow.astype(a.dtype)
        out, difference = out | (less > difference), less
    return difference, out


@op("carry_add carry_sub carry_mad", dsts=2)
def _carry(cg: Codegen, ins: Instr, mods: Mods) -> None:
    """Emit the extended-precision forms (.cc and addc, subc, madc); lowering made the carry flag an operand."""
    kind = ins.op.removeprefix("carry_")
    type_name = mods.type("u32", "s32", "u64", "s64")
    dst, carry_out, *sources = ins.args
    count = 3 if kind == "mad" else 2
    carry = cg.src(sources.pop(), "pred") if len(sources) > count else "None"
    if len(sources) != count:
        mods.fail("operand count")
    unsigned = "u" + type_name[1:]
    if kind == "mad":
        part = mods.choose("lo", "hi")
        x, y = (cg.src(v, type_name) for v in sources[:2])
        product = (
            f"mul_hi({x}, {y}).view({VIEWS[unsigned]!r})" if part == "hi" else f"({x} * {y}).view({VIEWS[unsigned]!r})"
        )
        values = [product, cg.src(sources[2], unsigned)]
    else:
        values = [cg.src(v, unsigned) for v in sources]
    function = cg.bind(sub_borrow if kind == "sub" else add_carry)
    total, flag = cg.name("v"), cg.name("v")
    cg.line(f"{total}, {flag} = {function}({values[0]}, {values[1]}, {carry})")
    poison = cg.poison()
    cg.out(dst, unsigned, total, poison)
    cg.out(carry_out, "pred", flag, poison)


@op("mul24 mad24")
def _mul24(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("u32", "s32")
    part = mods.choose("lo", "hi")
    dst, a, b, *rest = mods.args(3 if ins.op == "mul24" else 4)
    kind = type_name[0]

    def run(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        shift = 40
        wide = "i8" if kind == "s" else "u8"
        x24 = (x.astype(wide) << 40) >> shift
        y24 = (y.astype(wide) << 40) >> shift
        product = x24 * y24
        return (product >> 16 if part == "hi" else product).astype(x.dtype)

    expr = f"{cg.bind(run)}({cg.src(a, type_name)}, {cg.src(b, type_name)})"
    if rest:
        expr += f" + {cg.src(rest[0], type_name)}"
    cg.out(dst, type_name, expr)


@op("div rem")
def _div(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_div

        return float_div(cg, ins, mods)
    type_name = mods.type(*_INT)
    return binary(cg, ins, mods, type_name, f"int_{ins.op}({{a}}, {{b}})")


@op("min max")
def _minmax(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_minmax

        return float_minmax(cg, ins, mods)
    function = "np.minimum" if ins.op == "min" else "np.maximum"
    if _packed_int(cg, mods, getattr(np, function[3:])):
        return None
    type_name = mods.type(*_INT)
    relu = mods.flag("relu")
    template = f"{function}({{a}}, {{b}})"
    return binary(cg, ins, mods, type_name, f"np.maximum({template}, 0)" if relu else template)


@op("neg abs")
def _neg(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        from .ops_float import float_sign

        return float_sign(cg, ins, mods)
    type_name = mods.type("s16", "s32", "s64")
    dst, a = mods.args(2)
    return cg.out(dst, type_name, f"{'-' if ins.op == 'neg' else 'abs'}({cg.src(a, type_name)})")


@op("sad")
def _sad(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type(*_INT)
    dst, a, b, c = mods.args(4)
    x, y, z = (cg.src(v, type_name) for v in (a, b, c))
    cg.out(dst, type_name, f"{z} + where({x} < {y}, {y} - {x}, {x} - {y})")


@op("and or xor")
def _logic(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("pred", "b16", "b32", "b64")
    binary(cg, ins, mods, type_name, "{a} " + {"and": "&", "or": "|", "xor": "^"}[ins.op] + " {b}")


@op("not cnot")
def _not(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("pred", "b16", "b32", "b64")
    dst, a = mods.args(2)
    x = cg.src(a, type_name)
    cg.out(dst, type_name, f"~{x}" if ins.op == "not" else f"({x} == 0).astype({VIEWS[type_name]!r})")


@op("lop3")
def _lop3(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("b32")
    dst, a, b, c, table = mods.args(5)
    x, y, z = (cg.src(v, type_name) for v in (a, b, c))
    terms = []
    for index in range(8):
        if table.value >> index & 1:
            terms.append(
                f"({'' if index & 4 else '~'}{x} & {'' if index & 2 else '~'}{y} & {'' if index & 1 else '~'}{z})"
            )
    cg.out(dst, type_name, " | ".join(terms) if terms else cg.const(0, "u4"))


@op("shl shr")
def _shift(cg: Codegen, ins: Instr, mods: Mods) -> None:
    allowed = ("b16", "b32", "b64") if ins.op == "shl" else ("b16", "b32", "b64", *_INT)
    type_name = mods.type(*allowed)
    dst, a, b = mods.args(3)
    x = cg.src(a, type_name)
    if isinstance(b, Imm) and 0 <= b.value < TYPE_BITS[type_name]:
        amount = cg.const(b.value, VIEWS[type_name])
        return cg.out(dst, type_name, f"{x} {'<<' if ins.op == 'shl' else '>>'} {amount}")
    return cg.out(dst, type_name, f"shift_{'left' if ins.op == 'shl' else 'right'}({x}, {cg.src(b, 'u32')})")


@op("mov")
def _mov(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type()
    dst, a = mods.args(2)
    if isinstance(dst, Vec):
        return _unpack(cg, ins, dst, a, type_name)
    if isinstance(a, Vec):
        return _pack(cg, ins, dst, a, type_name)
    if type_name in ("f32", "f64") and not isinstance(a, Imm):
        # A move keeps the register's own array: no view, so that results still in flight stay shared.
        type_name = "b" + type_name[1:] if VIEWS[type_name] != _known_view(cg, a) else type_name
    elif _known_view(cg, a) in ("f4", "f8", "f2") and TYPE_BITS[type_name] == int(_known_view(cg, a)[1]) * 8:
        type_name = {"f2": "f16", "f4": "f32", "f8": "f64"}[_known_view(cg, a)]
    return cg.out(dst, type_name, cg.src(a, type_name))


def _known_view(cg: Codegen, operand: object) -> str:
    """Return the array type in which a register is at hand."""
    index = getattr(operand, "index", None)
    if not isinstance(index, int):
        return ""
    return next(iter(cg.views[index])) if index in cg.views else cg.cfg.storage[index]


def _pack(cg: Codegen, ins: Instr, dst: object, parts: Vec, type_name: str) -> None:
    bits = TYPE_BITS[type_name] // len(parts.items)
    if type_name == "b128":
        pieces = [cg.src(item, "b64") for item in parts.items]
        return cg.out(dst, "b128", f"np.stack(({', '.join(pieces)}), 1)")
    pieces = [cg.src(item, f"b{bits}") for item in parts.items]
    array = f"np.stack(({', '.join(pieces)}), 1)"
    return cg.out(dst, type_name, f"{array}.view({VIEWS[type_name]!r})[:, 0]")


def _unpack(cg: Codegen, ins: Instr, dst: Vec, source: object, type_name: str) -> None:
    count = len(dst.items)
    bits = TYPE_BITS[type_name] // count
    if TYPE_BITS[type_name] % count or f"b{bits}" not in TYPE_BITS:
        raise unknown(cg.kernel, ins, "bad unpacking")
    name = cg.name("v")
    value = cg.src(source, type_name)
    if type_name == "b128":
        cg.line(f"{name} = {value}")
    else:
        cg.line(f"{name} = np.ascontiguousarray({value}).view('u{bits // 8}').reshape(N, {count})")
    poison = cg.poison()
    for index, item in enumerate(dst.items):
        if item is not SINK:
            cg.out(item, f"b{bits}", f"{name}[:, {index}].copy()", poison)


@op("selp")
def _selp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type()
    dst, a, b, p = mods.args(4)
    cg.out(dst, type_name, f"where({cg.src(p, 'pred')}, {cg.src(a, type_name)}, {cg.src(b, type_name)})")


@op("slct")
def _slct(cg: Codegen, ins: Instr, mods: Mods) -> None:
    mods.flag("ftz")
    select = mods.type("s32", "f32")
    type_name = mods.type()
    dst, a, b, c = mods.args(4)
    cg.out(dst, type_name, f"where({cg.src(c, select)} >= 0, {cg.src(a, type_name)}, {cg.src(b, type_name)})")


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def comparison(name: str, x: str, y: str, is_float: bool) -> str:
    """Return the expression of a PTX comparison operator."""
    if name in ("num", "nan"):
        test = f"(np.isnan({x}) | np.isnan({y}))"
        return f"~{test}" if name == "num" else test
    if name in _UNORDERED:
        base = _UNORDERED[name]
        ordered = f"({x} {_COMPARE[base]} {y})"
        return ordered if base == "ne" else f"({ordered} | np.isnan({x}) | np.isnan({y}))"
    plain = f"({x} {_COMPARE[_UNSIGNED.get(name, name)]} {y})"
    if is_float and name == "ne":
        return f"({plain} & ~np.isnan({x}) & ~np.isnan({y}))"
    return plain


@op("setp set")
def _setp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    ftz = mods.flag("ftz")
    type_name = mods.type()
    result = mods.first_type() if ins.op == "set" else "pred"
    compare = mods.choose(*_COMPARE, *_UNSIGNED, *_UNORDERED, "num", "nan")
    combine = mods.choose("and", "or", "xor", default="none")
    dst, a, b, *rest = mods.args(3 if combine == "none" else 4)
    is_float = type_name in _FLOAT
    if compare in _UNSIGNED and type_name[0] in "sb":
        type_name = "u" + type_name[1:]
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    if type_name == "bf16":
        widen = cg.bind(lambda v: (v.astype("u4") << 16).view("f4"))
        x, y = f"{widen}({x})", f"{widen}({y})"
    if type_name in ("f16x2", "bf16x2"):
        return _setp_packed(cg, ins, mods, type_name, compare, dst, x, y, rest)
    if ftz and type_name == "f32":
        x, y = f"flush({x})", f"flush({y})"
    name = cg.name("m")
    cg.line(f"{name} = {comparison(compare, x, y, is_float)}")
    positive, negative = name, f"~{name}"
    if rest:
        symbol = {"and": "&", "or": "|", "xor": "^"}[combine]
        other = cg.src(rest[0], "pred")
        positive, negative = f"{name} {symbol} {other}", f"~{name} {symbol} {other}"
    if ins.op == "set":
        if result == "f32":
            return cg.out(dst, "f32", f"({positive}).astype('f4')")
        return cg.out(dst, result, f"where({positive}, {cg.const(-1, VIEWS[result])}, {cg.const(0, VIEWS[result])})")
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    poison = cg.poison()
    second_name = cg.name("m")
    if second is not SINK:
        cg.line(f"{second_name} = {negative}")
    cg.out(first, "pred", positive, poison)
    return cg.out(second, "pred", second_name, poison)


def _setp_packed(cg, ins, mods, type_name, compare, dst, x, y, rest) -> None:
    """Emit setp on packed halves: ``p|q`` get the low and the high comparison."""
    if rest or not isinstance(dst, Pair):
        mods.fail("packed comparison needs p|q and no combination")
    widen = cg.bind(halves_f16 if type_name == "f16x2" else halves_bf16)
    name, other = cg.name("m"), cg.name("m")
    cg.line(f"{name} = {widen}({x}); {other} = {widen}({y})")
    poison = cg.poison()
    for index, each in enumerate((dst.first, dst.second)):
        cg.out(each, "pred", comparison(compare, f"{name}[{index}]", f"{other}[{index}]", True), poison)


def halves_f16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high halves of packed f16 as float32."""
    pair = np.ascontiguousarray(x).view("f2").reshape(-1, 2).astype("f4")
    return pair[:, 0], pair[:, 1]


def halves_bf16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high halves of packed bf16 as float32."""
    return (x << np.uint32(16)).view("f4"), (x & np.uint32(0xFFFF0000)).view("f4")
