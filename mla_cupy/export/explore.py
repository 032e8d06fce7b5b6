"""All paths of a function over recorded numbers, as a decision diagram.

The function runs once for each combination of outcomes of its comparisons that is not ruled out by those before. The
paths are a tree, which is made as small as it gets: equal subtrees are merged, and comparisons
without consequences, or with a side that cannot happen, are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mla_cupy.export import expressions as ex
from mla_cupy.export import numbers
from mla_cupy.export.expressions import Expression, Span
from mla_cupy.export.numbers import CannotRecordError

MAX_PATHS = 20_000
"""The most paths of a function: more would take minutes, and hint at a loop over what is not known."""


@dataclass(frozen=True)
class Leaf:
    """The end of paths."""

    outcome: Hashable


@dataclass(frozen=True, eq=False)
class Branch:
    """A condition, and the diagrams of both sides; equal ones are one object."""

    condition: Expression
    then: Diagram
    otherwise: Diagram


Diagram = Leaf | Branch
Path = tuple[tuple[tuple[Expression, bool], ...], Hashable]

NEVER = Leaf("never")
"""A side that cannot happen, or that nobody needs."""


def explore(function: Callable[[], Hashable], given: Sequence[Diagram] = ()) -> list[Path]:
    """Run a function along every path: the decisions of each, in order, and what the function returned.

    `given` are rules that are known to come to None: what they forbid is not explored again.

    Raises
    ------
    CannotRecordError
        If there are too many, or Python needs a value.
    """
    paths: list[Path] = []
    forced: list[bool] = []
    while True:
        explorer = _Explorer(forced, given)
        with _deciding(explorer):
            outcome = function()
        paths.append((tuple(explorer.trace), outcome))
        if len(paths) > MAX_PATHS:
            raise CannotRecordError(f"more than {MAX_PATHS} paths; the last: {explorer.trace}")
        forced = [taken for _, taken in explorer.trace]
        while forced and not forced[-1]:
            forced.pop()
        if not forced:
            return paths
        forced[-1] = False


class _Explorer:
    """The decisions of one run: those that are forced, then True, as far as earlier ones leave a choice."""

    def __init__(self, forced: list[bool], given: Sequence[Diagram]) -> None:
        self._forced = forced
        self._given = [*given]
        self._known: dict[Expression, bool] = {}
        self._narrowed: dict[Expression, Span] = {}
        self._spans: dict[Expression, Span] = {}
        self.trace: list[tuple[Expression, bool]] = []

    def decide(self, condition: Expression) -> bool:
        """The side to take."""
        known = self._known.get(condition)
        if known is None:
            known = self._implied(condition)
        if known is None:
            known = self._left(condition)
        if known is not None:
            return known
        at = len(self.trace)
        taken = self._forced[at] if at < len(self._forced) else True
        self.trace.append((condition, taken))
        self._learn(condition, taken)
        return taken

    def _left(self, condition: Expression) -> bool | None:
        """The one side that the given rules leave; None if both can be, and where none can."""
        for at, rule in enumerate(self._given):
            while isinstance(rule, Branch) and rule.condition in self._known:
                rule = rule.then if self._known[rule.condition] else rule.otherwise
            self._given[at] = rule
        sides = [side for side in (True, False) if all(self._can_be(rule, condition, side) for rule in self._given)]
        if len(sides) != 1:
            return None
        self._learn(condition, sides[0])
        return sides[0]

    def _can_be(self, rule: Diagram, condition: Expression, side: bool) -> bool:
        """True if a rule may come to None with this decision, and those that have been made."""
        pending, seen = [rule], set[int]()
        while pending:
            part = pending.pop()
            if isinstance(part, Leaf):
                if part.outcome is None:
                    return True
            elif id(part) not in seen:
                seen.add(id(part))
                known = side if part.condition is condition else self._known.get(part.condition)
                pending += [part.then] if known is not False else []
                pending += [part.otherwise] if known is not True else []
        return False

    def _implied(self, condition: Expression) -> bool | None:
        """Truth of a condition, as far as constants and spans tell; None if they do not."""
        a, b = condition.args
        if a.value is not None and b.value is not None:
            return bool(ex.evaluate(condition, lambda name: None))
        if a.is_real:
            return None
        if a is b:
            return condition.op != ex.LESS
        (low, high), (b_low, b_high) = self._span(a), self._span(b)
        if condition.op == ex.EQUAL:
            return False if high < b_low or b_high < low else True if low == high == b_low == b_high else None
        slack = 0 if condition.op == ex.AT_MOST else 1
        return True if high + slack <= b_low else False if low + slack > b_high else None

    def _learn(self, condition: Expression, taken: bool) -> None:
        """Keep a decision, and what it says about the spans of both sides."""
        self._known[condition] = taken
        a, b = condition.args
        if a.is_real:
            return
        (low, high), (b_low, b_high) = self._span(a), self._span(b)
        if condition.op == ex.EQUAL:
            if taken:
                low = b_low = max(low, b_low)
                high = b_high = min(high, b_high)
            else:
                (low, high), (b_low, b_high) = (
                    _without((low, high), (b_low, b_high)),
                    _without((b_low, b_high), (low, high)),
                )
        else:
            slack = 0 if (condition.op == ex.AT_MOST) == taken else 1
            if taken:
                high, b_low = min(high, b_high - slack), max(b_low, low + slack)
            else:
                low, b_high = max(low, b_low + slack), min(b_high, high - slack)
        self._narrowed[a], self._narrowed[b] = (low, high), (b_low, b_high)
        self._spans.clear()

    def _span(self, expression: Expression) -> Span:
        """The span of an integer on this path."""
        found = self._spans.get(expression)
        if found is None:
            found = expression.span or (0, 0)
            if expression.op not in (ex.VARIABLE, ex.INTEGER, ex.TRUNCATE, *ex.CONDITIONS):
                spans = [None if arg.is_real else self._span(arg) for arg in expression.args]
                found = _common(found, ex.span_of(expression.op, expression.args, spans))
            found = self._spans[expression] = _common(found, self._narrowed.get(expression))
        return found


def _common(span: Span, other: Span | None) -> Span:
    return span if other is None else (max(span[0], other[0]), min(span[1], other[1]))


def _without(span: Span, other: Span) -> Span:
    """A span without one of its ends, if the other span is that end alone."""
    (low, high), (value, same) = span, other
    if value != same:
        return span
    return low + (low == value), high - (high == value)


@contextmanager
def _deciding(explorer: _Explorer) -> Iterator[None]:
    before, numbers.decide = numbers.decide, explorer.decide
    try:
        yield
    finally:
        numbers.decide = before


# ---- Diagrams ------------------------------------------------------------------------------------------------------


class Reducer:
    """Makes diagrams of paths; equal parts of all that it has made are one."""

    def __init__(self) -> None:
        self._leaves: dict[Hashable, Leaf] = {NEVER.outcome: NEVER}
        self._branches: dict[tuple[Expression, int, int], Branch] = {}

    def diagram(self, paths: list[Path], outcome: Callable[[Any], Hashable] = lambda found: found) -> Diagram:
        """The diagram of all paths of a function.

        `outcome` says of what the function returned what is wanted; NEVER.outcome where nothing is: such paths go
        wherever is easiest.
        """
        return self._build([(trace, outcome(found)) for trace, found in paths], 0)

    def _build(self, paths: list[Path], depth: int) -> Diagram:
        trace, outcome = paths[0]
        if len(trace) == depth:
            assert len(paths) == 1
            return self._leaves.setdefault(outcome, Leaf(outcome))
        sides = ([p for p in paths if p[0][depth][1]], [p for p in paths if not p[0][depth][1]])
        then, otherwise = (self._build(side, depth + 1) if side else NEVER for side in sides)
        return self._branch(trace[depth][0], then, otherwise)

    def _branch(self, condition: Expression, then: Diagram, otherwise: Diagram) -> Diagram:
        if then is otherwise or otherwise is NEVER:
            return then
        if then is NEVER:
            return otherwise
        key = condition, id(then), id(otherwise)
        return self._branches.setdefault(key, Branch(condition, then, otherwise))


def outcome(diagram: Diagram, values: Callable[[str], Any]) -> Any:
    """Outcome of a diagram for the values of the variables."""
    while isinstance(diagram, Branch):
        diagram = diagram.then if ex.evaluate(diagram.condition, values) else diagram.otherwise
    return diagram.outcome


def outcomes(diagram: Diagram) -> list[Any]:
    """Every outcome of a diagram, each once, in the order of the sides."""
    found: dict[int, Leaf] = {}
    seen: set[int] = set()

    def visit(part: Diagram) -> None:
        if isinstance(part, Leaf):
            found.setdefault(id(part), part)
        elif id(part) not in seen:
            seen.add(id(part))
            visit(part.then)
            visit(part.otherwise)

    visit(diagram)
    return [leaf.outcome for leaf in found.values()]
