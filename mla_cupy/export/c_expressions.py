"""Expressions and decision diagrams as C."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mla_cupy.export import expressions as ex
from mla_cupy.export.explore import NEVER, Branch, Diagram, Leaf
from mla_cupy.export.expressions import Expression
from mla_cupy.export.numbers import CannotRecordError

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_OPERATORS = {ex.ADD: ("+", "add"), ex.SUBTRACT: ("-", "subtract"), ex.MULTIPLY: ("*", "multiply")}
_FUNCTIONS = {ex.LEAST: "least", ex.GREATEST: "greatest", ex.MAGNITUDE: "magnitude"}
_DIVISIONS = {ex.FLOOR_DIVIDE: "floor_divide", ex.CEILING_DIVIDE: "ceiling_divide", ex.MODULO: "modulo"}
_EXACT = {ex.FLOOR_DIVIDE: "/", ex.MODULO: "%"}
_INT_BITS = 31


def local(name: str) -> str:
    """The local variable of a recorded one."""
    return re.sub(r"\W+", "_", name).strip("_")


def c(expression: Expression, *, bounded: bool = True) -> str:
    """An expression in C: of type int64_t or double, a condition an int. No operator binds across it.

    Unless it is `bounded`, its variables may have any value, so every sum and product stops at the ends of 64 bits.
    """
    op, args = expression.op, expression.args
    if op == ex.VARIABLE:
        return local(args[0])
    if op == ex.INTEGER:
        return _integer(args[0])
    if op == ex.REAL:
        return _real(args[0])
    parts = [c(arg, bounded=bounded) for arg in args]
    if op in ex.CONDITIONS:
        return f"({parts[0]} {op} {parts[1]})"
    if op == ex.WHERE:
        return f"({parts[0]} ? {parts[1]} : {parts[2]})"
    if op == ex.TO_REAL:
        return f"(double){parts[0]}"
    if op == ex.TRUNCATE:
        return f"(int64_t){parts[0]}"
    if op in _DIVISIONS:
        return _division(op, args, parts)
    if op in _FUNCTIONS:
        return f"{_FUNCTIONS[op]}{'_real' * expression.is_real}({', '.join(parts)})"
    symbol, saturating = _OPERATORS[op]
    plain = _fits(expression) if bounded else expression.is_real
    return f"({parts[0]} {symbol} {parts[1]})" if plain else f"{saturating}({', '.join(parts)})"


def _fits(expression: Expression) -> bool:
    """True if no value of an expression is beyond 64 bits."""
    span = expression.span
    return span is None or (span[0] >= _SMALLEST and span[1] <= _LARGEST)


def _division(op: str, args: tuple[Expression, ...], parts: list[str]) -> str:
    if not all(map(_fits, args)):
        raise CannotRecordError(f"{args[0]} {op} {args[1]}: the first does not fit 64 bits")
    if op in _EXACT and args[0].span and args[0].span[0] >= 0:
        return f"({parts[0]} {_EXACT[op]} {parts[1]})"
    return f"{_DIVISIONS[op]}({', '.join(parts)})"


def _integer(value: int) -> str:
    if not _SMALLEST < value <= _LARGEST:
        raise CannotRecordError(f"{value} does not fit 64 bits")
    text = str(value) if abs(value) < 1 << _INT_BITS else f"INT64_C({value})"
    return f"({text})" if value < 0 else text


def _real(value: float) -> str:
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    if math.isnan(value):
        return "NAN"
    return f"({value.hex()})" if value < 0 else value.hex()


# ---- Texts ---------------------------------------------------------------------------------------------------------


def printed(pieces: tuple[Any, ...]) -> str:
    """The arguments of printf for a text with expressions in it."""
    form, values = "", []
    for piece in pieces:
        if isinstance(piece, str):
            form += piece.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%")
            continue
        expression, spec = piece
        if expression.is_real:
            form += "%.17g"
            values.append(c(expression))
        else:
            form += "0x%llx" if spec.endswith("x") else "%lld"
            values.append(f"({'unsigned ' * spec.endswith('x')}long long){c(expression)}")
    return ", ".join([f'"{form}"', *values])


# ---- Diagrams ------------------------------------------------------------------------------------------------------

_LABELLED = 3
"""Lines from which on a part that several branches lead to is written once, and jumped to."""


class Statements:
    """C statements of a diagram: every way through them ends with the code of a leaf.

    Parameters
    ----------
    leaf : callable
        The lines of an outcome; the last one leaves.
    prefix : str
        Of labels, which are unique in a function.
    """

    def __init__(self, leaf: Callable[[Any], list[str]], prefix: str = "case") -> None:
        self._leaf = leaf
        self._prefix = prefix
        self._uses: Counter[int] = Counter()
        self._labels: dict[int, str] = {}

    def lines(self, diagram: Diagram) -> list[str]:
        """The statements."""
        self._count(diagram)
        return self._lines(diagram)

    def _count(self, diagram: Diagram) -> None:
        self._uses[id(diagram)] += 1
        if isinstance(diagram, Branch) and self._uses[id(diagram)] == 1:
            self._count(diagram.then)
            self._count(diagram.otherwise)

    def _lines(self, diagram: Diagram) -> list[str]:
        if id(diagram) in self._labels:
            return [f"goto {self._labels[id(diagram)]};"]
        found = list(self._leaf(diagram.outcome)) if isinstance(diagram, Leaf) else []
        shared = self._uses[id(diagram)] > 1 and (isinstance(diagram, Branch) or len(found) > _LABELLED)
        if shared:
            self._labels[id(diagram)] = f"{self._prefix}_{len(self._labels)}"
        if isinstance(diagram, Branch):
            found = self._branch(diagram)
        return [f"{self._labels[id(diagram)]}:;", *found] if shared else found

    def _branch(self, branch: Branch) -> list[str]:
        condition, inner, after = c(branch.condition), branch.then, branch.otherwise
        if isinstance(after, Leaf) and not isinstance(inner, Leaf):
            condition, inner, after = f"(!{condition})", after, inner
        first = self._lines(inner)
        if _is_short(first):
            return [f"if {condition} {first[0]}", *self._lines(after)]
        return [f"if {condition} {{", *indented(first), "}", *self._lines(after)]


def _is_short(lines: list[str]) -> bool:
    return len(lines) == 1 and lines[0].startswith(("return", "goto", "break"))


def indented(lines: list[str]) -> list[str]:
    """Lines one level deeper."""
    return [f"    {line}" if line and not re.match(r"\w+:;", line) else line for line in lines]


def variables(diagrams: list[Diagram], of_leaf: Callable[[Any], Iterator[Expression]]) -> dict[str, Expression]:
    """The variables that diagrams read, by name, in the order in which they first do."""
    found: dict[str, Expression] = {}
    seen: set[int] = set()

    def add(expression: Expression) -> None:
        for each in expression.walk():
            if each.op == ex.VARIABLE:
                found.setdefault(each.args[0], each)

    def visit(diagram: Diagram) -> None:
        if id(diagram) in seen or diagram is NEVER:
            return
        seen.add(id(diagram))
        if isinstance(diagram, Leaf):
            for expression in of_leaf(diagram.outcome):
                add(expression)
            return
        add(diagram.condition)
        visit(diagram.then)
        visit(diagram.otherwise)

    for diagram in diagrams:
        visit(diagram)
    return found
