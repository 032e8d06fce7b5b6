"""Expressions over the arguments of a call: what arithmetic on recorded numbers leaves behind.

Equal expressions are one object, so that they can be compared and looked up by identity. Every integer one knows its
span: the least and the greatest value that it may have, from the spans of the variables in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

Span = tuple[int, int]

VARIABLE, INTEGER, REAL = "variable", "integer", "real"
"""Operators of leaves: a variable has its name and span, a constant its value."""
ADD, SUBTRACT, MULTIPLY, DIVIDE = "+", "-", "*", "/"
FLOOR_DIVIDE, CEILING_DIVIDE, MODULO = "//", "ceil//", "%"
LEAST, GREATEST, MAGNITUDE = "min", "max", "abs"
TO_REAL, TRUNCATE = "real()", "int()"
LESS, AT_MOST, EQUAL = "<", "<=", "=="
WHERE = "where"
"""`where(condition, then, otherwise)`."""
CONDITIONS = (LESS, AT_MOST, EQUAL)

_serial = itertools.count()


class Expression:
    """An operator and its operands.

    Attributes
    ----------
    op : str
    args : tuple
        Expressions; of leaves the value, or the name.
    span : tuple of int, or None
        Of an integer; None for a real number.
    number : int
        In the order in which expressions were made: how texts refer to them.
    """

    __slots__ = ("args", "number", "op", "span")

    def __init__(self, op: str, args: tuple[Any, ...], span: Span | None) -> None:
        self.op, self.args, self.span = op, args, span
        self.number = next(_serial)

    @property
    def is_real(self) -> bool:
        """True for a real number."""
        return self.span is None

    @property
    def value(self) -> Any:
        """The value of a constant; None for anything else."""
        return self.args[0] if self.op in (INTEGER, REAL) else None

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(repr, self.args))})"

    def walk(self) -> Iterator[Expression]:
        """Every expression in it, itself last."""
        for arg in self.args:
            if isinstance(arg, Expression):
                yield from arg.walk()
        yield self


@functools.lru_cache(maxsize=None, typed=True)
def variable(name: str, low: int, high: int) -> Expression:
    """An integer argument that lies between two bounds, both included."""
    return Expression(VARIABLE, (name,), (low, high))


@functools.cache
def real_variable(name: str) -> Expression:
    """A real argument."""
    return Expression(VARIABLE, (name,), None)


@functools.cache
def integer(value: int) -> Expression:
    """A whole number."""
    return Expression(INTEGER, (value,), (value, value))


@functools.cache
def real(value: float) -> Expression:
    """A real number."""
    return Expression(REAL, (value,), None)


def make(op: str, *args: Expression) -> Expression:
    """An expression, as simple as it is easy to make; division is by a number above 0 alone."""
    folded = _folded(op, args)
    return _interned(op, args) if folded is None else folded


@functools.cache
def _interned(op: str, args: tuple[Expression, ...]) -> Expression:
    return Expression(op, args, span_of(op, args, [arg.span for arg in args]))


# ---- Simplification ------------------------------------------------------------------------------------------------

_EVALUATE: dict[str, Callable[..., Any]] = {
    ADD: lambda a, b: a + b,
    SUBTRACT: lambda a, b: a - b,
    MULTIPLY: lambda a, b: a * b,
    DIVIDE: lambda a, b: a / b,
    FLOOR_DIVIDE: lambda a, b: a // b,
    CEILING_DIVIDE: lambda a, b: -(-a // b),
    MODULO: lambda a, b: a % b,
    LEAST: min,
    GREATEST: max,
    MAGNITUDE: abs,
    TO_REAL: float,
    TRUNCATE: int,
    LESS: lambda a, b: a < b,
    AT_MOST: lambda a, b: a <= b,
    EQUAL: lambda a, b: a == b,
}


def evaluate(expression: Expression, values: Callable[[str], Any]) -> Any:
    """The value for the variables' values: True or False for a condition."""
    if expression.op in (INTEGER, REAL):
        return expression.value
    if expression.op == VARIABLE:
        return values(expression.args[0])
    if expression.op == WHERE:
        condition, then, otherwise = expression.args
        return evaluate(then if evaluate(condition, values) else otherwise, values)
    return _EVALUATE[expression.op](*(evaluate(arg, values) for arg in expression.args))


def _folded(op: str, args: tuple[Expression, ...]) -> Expression | None:
    """Simpler form of an expression that needs no operator; None if there is none."""
    if op not in CONDITIONS and all(arg.op in (INTEGER, REAL) for arg in args):
        found = _EVALUATE[op](*(arg.value for arg in args))
        return real(found) if isinstance(found, float) else integer(found)
    if len(args) != 2 or any(arg.is_real for arg in args) or op in CONDITIONS:
        return None
    return _folded_pair(op, *args)


def _folded_pair(op: str, a: Expression, b: Expression) -> Expression | None:
    (low, high), (b_low, b_high) = a.span or (0, 0), b.span or (0, 0)
    if op in (ADD, SUBTRACT) and b.value == 0:
        return a
    if op == ADD and a.value == 0:
        return b
    if op == MULTIPLY and 1 in (a.value, b.value):
        return b if a.value == 1 else a
    if op == MULTIPLY and 0 in (a.value, b.value):
        return integer(0)
    if op in (FLOOR_DIVIDE, CEILING_DIVIDE) and b.value == 1:
        return a
    if op == MODULO and b.value:
        return _simpler_remainder(a, b)
    if op in (LEAST, GREATEST) and (a is b or high <= b_low or b_high <= low):
        return a if a is b or (high <= b_low) == (op == LEAST) else b
    return None


def _simpler_remainder(a: Expression, b: Expression) -> Expression | None:
    """A remainder without what is a multiple of the divisor: a sum that leaves 64 bits may have one that does not."""
    if _is_multiple(a, b.value):
        return integer(0)
    if a.op == ADD and any(_is_multiple(arg, b.value) for arg in a.args):
        (other,) = (arg for arg in a.args if not _is_multiple(arg, b.value))
        return make(MODULO, other, b)
    return None


def _is_multiple(a: Expression, of: int) -> bool:
    if a.op == INTEGER:
        return bool(a.value % of == 0)
    if a.op in (ADD, SUBTRACT):
        return all(_is_multiple(arg, of) for arg in a.args)
    return a.op == MULTIPLY and any(_is_multiple(arg, of) for arg in a.args)


# ---- Spans ---------------------------------------------------------------------------------------------------------


def span_of(op: str, args: tuple[Any, ...], spans: list[Span | None]) -> Span | None:
    """The span of an expression, from its operands' spans; None for a real number."""
    if op in CONDITIONS:
        return 0, 1
    if op == WHERE:
        spans = spans[1:]
        return None if None in spans else (min(s[0] for s in spans if s), max(s[1] for s in spans if s))
    if op == TRUNCATE:
        return -(2**62), 2**62
    if op in (DIVIDE, TO_REAL) or None in spans:
        return None
    whole: list[Span] = [span for span in spans if span is not None]
    if op == MAGNITUDE:
        ((low, high),) = whole
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if op == MODULO:
        return _span_of_remainder(*whole)
    corners = [_EVALUATE[op](a, b) for a in whole[0] for b in whole[1] if b or op not in (FLOOR_DIVIDE, CEILING_DIVIDE)]
    return min(corners), max(corners)


def _span_of_remainder(dividend: Span, divisor: Span) -> Span:
    low, high = dividend
    return (low, high) if low >= 0 and high < divisor[0] else (0, divisor[1] - 1)
