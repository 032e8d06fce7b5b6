"""Numbers that write down what is computed with them, in place of the sizes, strides and addresses of a call.

The Python that decides about a call (`ops`, `kernels`) gets them and does not know. A comparison of theirs is a
`Truth`; where Python needs to know which, the path explorer decides (`explore`).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from typing import Any

from mla_cupy.export import expressions as ex
from mla_cupy.export.expressions import Expression

_MARK = "\N{MATHEMATICAL LEFT DOUBLE ANGLE BRACKET}{}:{}\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}"
_MARKS = re.compile(_MARK.replace("{}", "(\\d+)", 1).replace("{}", "([^\N{MATHEMATICAL RIGHT DOUBLE ANGLE BRACKET}]*)"))
_told: dict[int, Expression] = {}
"""The expressions that texts refer to, by number."""


class CannotRecordError(Exception):
    """Python asks for the value of a number that stands for any."""


def undecided(condition: Expression) -> bool:
    """The decision outside of an exploration, where there is none."""
    raise CannotRecordError(f"Python branches on {condition}, and no path is being explored")


decide: Callable[[Expression], bool] = undecided
"""Decision about a condition on the path at hand: the explorer's, while it runs."""


class Number:
    """Base of the numbers: operators, and texts in which they are marks."""

    __slots__ = ("expression",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    def __add__(self, other: Any) -> Any:
        return _combined(ex.ADD, self, other)

    def __radd__(self, other: Any) -> Any:
        return _combined(ex.ADD, other, self)

    def __sub__(self, other: Any) -> Any:
        return _combined(ex.SUBTRACT, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _combined(ex.SUBTRACT, other, self)

    def __mul__(self, other: Any) -> Any:
        return _combined(ex.MULTIPLY, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _combined(ex.MULTIPLY, other, self)

    def __lt__(self, other: Any) -> Any:
        return _compared(ex.LESS, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(ex.LESS, other, self)

    def __le__(self, other: Any) -> Any:
        return _compared(ex.AT_MOST, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(ex.AT_MOST, other, self)

    def __eq__(self, other: Any) -> Any:
        return _compared(ex.EQUAL, self, other) if is_numeric(other) else False

    def __ne__(self, other: Any) -> Any:
        return not self == other

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> Any:
        return 0 - self

    def __str__(self) -> str:
        return format(self, "")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        _told[self.expression.number] = self.expression
        return _MARK.format(self.expression.number, spec)

    def _refuse(self) -> Any:
        raise CannotRecordError(f"Python needs the value of {self.expression}")

    __index__ = __int__ = __float__ = _refuse


class Integer(Number):
    """A whole number."""

    __slots__ = ()

    def __neg__(self) -> Any:
        expression = self.expression
        if expression.op == ex.FLOOR_DIVIDE:  # -(-a // b), as ceilings are written
            negated, divisor = expression.args
            if negated.op == ex.SUBTRACT and negated.args[0].value == 0:
                return Integer(ex.make(ex.CEILING_DIVIDE, negated.args[1], divisor))
        return 0 - self

    def __floordiv__(self, other: Any) -> Any:
        return _divided(ex.FLOOR_DIVIDE, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided(ex.FLOOR_DIVIDE, other, self)

    def __mod__(self, other: Any) -> Any:
        return _divided(ex.MODULO, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _divided(ex.MODULO, other, self)

    def __abs__(self) -> Integer:
        return Integer(ex.make(ex.MAGNITUDE, self.expression))


class Real(Number):
    """A real number, in double precision."""

    __slots__ = ()

    def __abs__(self) -> Real:
        return Real(ex.make(ex.MAGNITUDE, self.expression))


class Truth:
    """A comparison; Python's branches on it are the explorer's decisions."""

    __slots__ = ("expression",)

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    def __bool__(self) -> bool:
        return decide(self.expression)

    def __repr__(self) -> str:
        return str(bool(self))


def is_numeric(x: Any) -> bool:
    """True for a number of Python or of this module."""
    return builtins.isinstance(x, (builtins.int, builtins.float, Number, Truth))


def expression_of(x: Any) -> Expression:
    """The expression of a number of either kind; of a truth value it is 0 or 1."""
    if builtins.isinstance(x, Number):
        return x.expression
    if builtins.isinstance(x, Truth):
        return ex.make(ex.WHERE, x.expression, ex.integer(1), ex.integer(0))
    return ex.real(x) if builtins.isinstance(x, builtins.float) else ex.integer(builtins.int(x))


def number_of(expression: Expression) -> Any:
    """The number of an expression: Python's own of a constant."""
    if expression.value is not None:
        return expression.value
    return Real(expression) if expression.is_real else Integer(expression)


def to_real(x: Any) -> Any:
    """A number as a real one."""
    found = expression_of(x)
    return number_of(found if found.is_real else ex.make(ex.TO_REAL, found))


def _alike(*numbers: Any) -> list[Expression]:
    """Their expressions: all of integers, or all of real numbers."""
    found = [expression_of(x) for x in numbers]
    if any(each.is_real for each in found):
        return [each if each.is_real else ex.make(ex.TO_REAL, each) for each in found]
    return found


def _combined(op: str, a: Any, b: Any) -> Any:
    if not (is_numeric(a) and is_numeric(b)):
        return NotImplemented
    return number_of(ex.make(op, *_alike(a, b)))


def _compared(op: str, a: Any, b: Any) -> Any:
    if not (is_numeric(a) and is_numeric(b)):
        return NotImplemented
    return Truth(ex.make(op, *_alike(a, b)))


def _divided(op: str, a: Any, b: Any) -> Any:
    if not (is_numeric(a) and is_numeric(b)):
        return NotImplemented
    dividend, divisor = _alike(a, b)
    if dividend.is_real:
        raise CannotRecordError(f"division of reals by {op} is not recorded")
    if divisor.span is None or divisor.span[0] <= 0:
        if b == 0:
            raise ZeroDivisionError("division by zero")
        if b < 0:
            raise CannotRecordError(f"a division by {divisor}, which may be less than 0")
        divisor = ex.make(ex.GREATEST, divisor, ex.integer(1))  # this path knows, the expression does not
    return number_of(ex.make(op, dividend, divisor))


def extremum(op: str, values: list[Any]) -> Any:
    """The least or the greatest of several."""
    found = _alike(*values)
    result = found[0]
    for each in found[1:]:
        result = ex.make(op, result, each)
    return number_of(result)


def pieces(text: str) -> tuple[Any, ...]:
    """A text cut at its marks: str, then (expression, format), then str, and so on."""
    parts = _MARKS.split(text)
    marks = [(_told[int(number)], spec) for number, spec in zip(parts[1::3], parts[2::3], strict=True)]
    texts = parts[0::3]
    return (texts[0], *(x for pair in zip(marks, texts[1:], strict=True) for x in pair))
