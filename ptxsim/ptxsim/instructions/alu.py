"""Emitters of integer, logic, comparison and move instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arithmetic import native, numeric
from ..arithmetic.formats import flush_half, halves_bf16, halves_f16
from ..arithmetic.numeric import Poison
from ..arithmetic.undefined import logic, moved, repacked
from ..parsing.ir import SINK, TYPE_BITS, Imm, Instr, Pair, Vec
from ..translation.cfg import VIEWS
from ..translation.codegen import Codegen
from ..translation.registry import Mods, op, unknown
from .floats import float_binary, float_div, float_fma, float_minmax, float_sign

_INT = ("u16", "u32", "u64", "s16", "s32", "s64")
_FLOAT = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
_PACKED_INT = ("u16x2", "s16x2")


def lanes16(x: np.ndarray, view: str) -> np.ndarray:
    """See packed 32-bit elements as pairs of 16-bit elements."""
    return np.ascontiguousarray(x).view(view)


def packed(function: Any, view: str) -> Any:
    """Return a function on packed 32-bit arrays that applies ``function`` to their 16-bit halves."""

    def apply(*args: np.ndarray) -> np.ndarray:
        return np.asarray(function(*(lanes16(a, view) for a in args))).astype(view, copy=False).view("u4")

    return apply


def binary(cg: Codegen, ins: Instr, mods: Mods, type_name: str, template: str) -> None:
    """Emit ``d = template(a, b)`` for one type."""
    dst, a, b = mods.args(3)
    x, y = cg.src(a, type_name), cg.src(b, type_name)
    cg.out(dst, type_name, template.format(a=x, b=y))


def _packed_int(cg: Codegen, mods: Mods, function: Any) -> bool:
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
        return _add_to(cg, mods, dst, type_name, f"mul_hi({x}, {y})", cg.src(c, type_name))
    wide = f"{type_name[0]}{TYPE_BITS[type_name] * 2}"
    return cg.out(dst, wide, f"{x}.astype({VIEWS[wide]!r}) * {y} + {cg.src(c, wide)}")


def _add_to(cg: Codegen, mods: Mods, dst: Any, type_name: str, product: str, addend: str) -> None:
    """Emit the sum of a multiply-add, clamped when ``.sat`` asks for it."""
    if mods.flag("sat"):
        if type_name != "s32":
            mods.fail(".sat needs .s32")
        return cg.out(dst, type_name, f"{cg.bind(numeric.saturating_add)}({product}, {addend}, 1)")
    return cg.out(dst, type_name, f"{product} + {addend}")


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
        return _add_to(cg, mods, dst, type_name, expr, cg.src(rest[0], type_name))
    return cg.out(dst, type_name, expr)


@op("div rem")
def _div(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        return float_div(cg, ins, mods)
    type_name = mods.type(*_INT)
    return binary(cg, ins, mods, type_name, f"int_{ins.op}({{a}}, {{b}})")


@op("min max")
def _minmax(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
        return float_minmax(cg, ins, mods)
    function: Callable = np.minimum if ins.op == "min" else np.maximum
    if mods.flag("relu"):
        if not {"s16x2", "s32"} & set(mods.left):
            mods.fail(".relu needs .s16x2 or .s32")
        plain = function

        def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.maximum(plain(a, b), a.dtype.type(0))

    if _packed_int(cg, mods, function):
        return None
    return binary(cg, ins, mods, mods.type(*_INT), cg.bind(function) + "({a}, {b})")


@op("neg abs")
def _neg(cg: Codegen, ins: Instr, mods: Mods) -> None:
    if any(m in _FLOAT for m in mods.left):
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


_LOGIC = {"and": ("&", 0b1000), "or": ("|", 0b1110), "xor": ("^", 0b0110)}
"""NumPy's operators and the truth tables of logic instructions."""


def _same(*operands: Any) -> tuple[int, ...]:
    """Return for each operand the number of the first that equals it."""
    return tuple(operands.index(each) for each in operands)


@op("and or xor")
def _logic(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("pred", "b16", "b32", "b64")
    dst, a, b = mods.args(3)
    pairs = [cg.masked(each, type_name) for each in (a, b)]
    sign, table = _LOGIC[ins.op]
    cg.bitwise(dst, type_name, f"{pairs[0][0]} {sign} {pairs[1][0]}", logic(table, _same(a, b)), pairs)


@op("not cnot")
def _not(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type("pred", "b16", "b32", "b64")
    dst, a = mods.args(2)
    if ins.op == "not":
        pair = cg.masked(a, type_name)
        return cg.bitwise(dst, type_name, f"~{pair[0]}", logic(0b01, (0,)), [pair])
    x = cg.src(a, type_name)
    return cg.out(dst, type_name, f"({x} == 0).astype({VIEWS[type_name]!r})")


@op("lop3")
def _lop3(cg: Codegen, ins: Instr, mods: Mods) -> None:
    combine = mods.choose("and", "or", default="")
    type_name = mods.type("b32")
    dst, a, b, c, table, *rest = mods.args(6 if combine else 5)
    pairs = [cg.masked(v, type_name) for v in (a, b, c)]
    x, y, z = (value for value, _ in pairs)
    terms = []
    for index in range(8):
        if table.value >> index & 1:
            terms.append(
                f"({'' if index & 4 else '~'}{x} & {'' if index & 2 else '~'}{y} & {'' if index & 1 else '~'}{z})"
            )
    result = " | ".join(terms) if terms else cg.const(0, "u4")
    if not combine:
        return cg.bitwise(dst, type_name, result, logic(table.value & 0xFF, _same(a, b, c)), pairs)
    if not isinstance(dst, Pair):
        mods.fail("needs two destinations d|p")
    name, truth = cg.name("v"), cg.name("m")
    cg.line(f"{name} = {result}")
    cg.line(f"{truth} = ({name} != 0) {'&' if combine == 'and' else '|'} {cg.src(rest[0], 'pred')}")
    poison = cg.poison()
    cg.out(dst.first, type_name, name, poison)
    return cg.out(dst.second, "pred", truth, poison)


@op("shl shr")
def _shift(cg: Codegen, ins: Instr, mods: Mods) -> None:
    allowed = ("b16", "b32", "b64") if ins.op == "shl" else ("b16", "b32", "b64", *_INT)
    type_name = mods.type(*allowed)
    dst, a, b = mods.args(3)
    pairs = [cg.masked(a, type_name), cg.masked(b, "u32")]
    (x, _), (amount, _) = pairs
    name = f"shift_{'left' if ins.op == 'shl' else 'right'}"
    mask = moved(native.FUNCTIONS[name])
    if isinstance(b, Imm) and 0 <= b.value < TYPE_BITS[type_name]:
        fixed = cg.const(b.value, VIEWS[type_name])
        return cg.bitwise(dst, type_name, f"{x} {'<<' if ins.op == 'shl' else '>>'} {fixed}", mask, pairs)
    return cg.bitwise(dst, type_name, f"{name}({x}, {amount})", mask, pairs)


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
    value = cg.src(a, type_name)
    return cg.out(dst, type_name, value, cg.poison(bits=True))


def _known_view(cg: Codegen, operand: Any) -> str:
    """Return the array type in which a register is available."""
    index = getattr(operand, "index", None)
    if not isinstance(index, int):
        return ""
    return next(iter(cg.views[index])) if index in cg.views else cg.cfg.storage[index]


def _pack(cg: Codegen, ins: Instr, dst: Any, parts: Vec, type_name: str) -> None:
    bits = TYPE_BITS[type_name] // len(parts.items)
    if type_name == "b128":
        pieces = [cg.src(item, "b64") for item in parts.items]
        return cg.out(dst, "b128", f"np.stack(({', '.join(pieces)}), 1)")
    pairs = [cg.masked(item, f"b{bits}") for item in parts.items]
    view = VIEWS[type_name]
    array = f"np.stack(({', '.join(value for value, _ in pairs)}), 1)"

    def join(*pieces: np.ndarray) -> np.ndarray:
        return np.stack(pieces, 1).view(view)[:, 0]

    return cg.bitwise(dst, type_name, f"{array}.view({view!r})[:, 0]", repacked(join), pairs)


def _unpack(cg: Codegen, ins: Instr, dst: Vec, source: Any, type_name: str) -> None:
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
    whole = cg.sources[0] if len(cg.sources) == 1 and type_name != "b128" else None
    for index, item in enumerate(dst.items):
        if item is SINK:
            continue
        mask = poison
        if whole is not None:
            mask = f"None if {whole} is None else {cg.bind(_piece(index, count, bits))}({value}, {whole})"
        cg.out(item, f"b{bits}", f"{name}[:, {index}].copy()", mask)


@functools.cache
def _piece(index: int, count: int, bits: int) -> Callable[..., Poison]:
    """Return the mask of one of the parts of a value, given the value and its mask."""
    return repacked(lambda x: np.ascontiguousarray(x).view(f"u{bits // 8}").reshape(-1, count)[:, index])


def choose(cg: Codegen, dst: Any, type_name: str, test: str, a: Any, b: Any) -> None:
    """Emit a selection by an expression just read: a lane is poisoned by the test and by the value it takes."""
    tested = cg.sources
    name, values, masks = cg.named(test, "m"), [], []
    for operand in (a, b):
        cg.sources = []
        values.append(cg.src(operand, type_name))
        masks.append(cg.sources[0] if cg.sources else None)
    cg.sources = tested
    if masks != [None, None]:
        taken = cg.name("q")
        cg.line(f"{taken} = selq({name}, {masks[0]}, {masks[1]})")
        cg.sources = [*tested, taken]
    cg.out(dst, type_name, f"where({name}, {values[0]}, {values[1]})")


@op("selp")
def _selp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    type_name = mods.type()
    dst, a, b, p = mods.args(4)
    choose(cg, dst, type_name, cg.src(p, "pred"), a, b)


@op("slct")
def _slct(cg: Codegen, ins: Instr, mods: Mods) -> None:
    ftz = mods.flag("ftz")
    select = mods.type("s32", "f32")
    type_name = mods.type()
    dst, a, b, c = mods.args(4)
    chooser = cg.src(c, select)
    if ftz and select == "f32":
        chooser = f"flush({chooser})"
    choose(cg, dst, type_name, f"{chooser} >= 0", a, b)


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


_PACKED_HALF = ("f16x2", "bf16x2")
_TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


@op("setp set")
def _setp(cg: Codegen, ins: Instr, mods: Mods) -> None:
    ftz = mods.flag("ftz")
    type_name = mods.type()
    result = mods.first_type() if ins.op == "set" else "pred"
    compare = mods.choose(*_COMPARE, *_UNSIGNED, *_UNORDERED, "num", "nan")
    combine = mods.choose("and", "or", "xor", default="none")
    dst, a, b, *rest = mods.args(3 if combine == "none" else 4)
    if compare in _UNSIGNED and type_name[0] in "sb" and type_name != "bf16":
        type_name = "u" + type_name[1:]
    if compare in ("eq", "ne") and type_name in _INT:
        type_name = "u" + type_name[1:]
    sides = [_comparable(cg, v, type_name, ftz) for v in (a, b)]
    other = cg.src(rest[0], "pred") if rest else ""
    tests, opposites = [], []
    for x, y in zip(*sides, strict=True):
        name = cg.name("m")
        cg.line(f"{name} = {comparison(compare, x, y, type_name in _FLOAT)}")
        tail = f" {_COMBINE[combine]} {other}" if rest else ""
        tests.append(f"({name}{tail})" if tail else name)
        opposites.append(f"(~{name}{tail})")
    if ins.op == "set":
        return _set_result(cg, mods, dst, result, tests)
    if len(tests) == 2 and not isinstance(dst, Pair):
        mods.fail("a packed comparison needs p|q")
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    poison = cg.poison()
    values = [(first, tests[0]), (second, tests[1] if len(tests) == 2 else opposites[0])]
    names = []
    for target, expr in values:  # Both are read before either is written: a destination may be a source.
        names.append("" if target is SINK else expr if expr.isidentifier() else cg.name("m"))
        if names[-1] not in ("", expr):
            cg.line(f"{names[-1]} = {expr}")
    cg.out(first, "pred", names[0], poison)
    return cg.out(second, "pred", names[1], poison)


_COMBINE = {"and": "&", "or": "|", "xor": "^"}


def _comparable(cg: Codegen, operand: Any, type_name: str, ftz: bool) -> list[str]:
    """Return expressions for an operand's numbers: one, or the low and high half of a packed type."""
    x = cg.src(operand, type_name)
    if type_name in _PACKED_HALF:
        name = cg.name("m")
        cg.line(f"{name} = {cg.bind(halves_f16 if type_name == 'f16x2' else halves_bf16)}({x})")
        parts = [f"{name}[0]", f"{name}[1]"]
        return [f"{cg.bind(flush_half)}({part})" for part in parts] if ftz and type_name == "f16x2" else parts
    if type_name == "bf16":
        return [f"{cg.bind(lambda v: (v.astype('u4') << 16).view('f4'))}({x})"]
    if ftz and type_name == "f16":
        return [f"{cg.bind(flush_half)}({x})"]
    return [f"flush({x})" if ftz and type_name == "f32" else x]


def _set_result(cg: Codegen, mods: Mods, dst: Any, result: str, tests: list[str]) -> None:
    """Write the result of ``set``: 1.0, or all ones in an integer."""
    if (result in _PACKED_HALF) != (len(tests) == 2):
        mods.fail("a packed comparison has a packed result")
    bits = TYPE_BITS[result] // len(tests)
    true = cg.const(_TRUE.get(result, (1 << bits) - 1), f"u{bits // 8}")
    halves = [f"where({test}, {true}, {cg.const(0, f'u{bits // 8}')})" for test in tests]
    if len(halves) == 2:
        return cg.out(dst, "b32", f"({halves[0]}).astype('u4') | ({halves[1]}).astype('u4') << np.uint32(16)")
    return cg.out(dst, f"b{bits}", halves[0])
