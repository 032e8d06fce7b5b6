"""Recording: numbers that write down what is computed, all paths of a function, and the diagrams that come of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.export import explore
from mla_cupy.export import expressions as ex
from mla_cupy.export.apart import Apart
from mla_cupy.export.explore import NEVER, Branch, Leaf, Reducer
from mla_cupy.export.numbers import CannotRecordError, Integer, Real, expression_of, pieces
from mla_cupy.export.patching import patched_builtins
from mla_cupy.kernels import choice
from mla_cupy.ops import checks

LOW, HIGH = -40, 40
X, Y = (Integer(ex.variable(name, LOW, HIGH)) for name in "xy")
N = Integer(ex.variable("n", 1, 9))
R = Real(ex.real_variable("r"))
FORMULAS: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, y, n: x + 2 * y - n,
    lambda x, y, n: -(-x // n),
    lambda x, y, n: x // n + (y - x) // 7,
    lambda x, y, n: (x * y) % n,
    lambda x, y, n: 100 % n - (3 - x) * n,
    lambda x, y, n: abs(x - y) * 1 + 0 * y,
]


def diagram(function: Callable[[], Any]) -> explore.Diagram:
    return Reducer().diagram(explore.explore(function))


def values_of(rng: random.Random) -> dict[str, Any]:
    return {"x": rng.randint(LOW, HIGH), "y": rng.randint(LOW, HIGH), "n": rng.randint(1, 9), "r": rng.uniform(-5, 5)}


@pytest.mark.parametrize("formula", FORMULAS)
def test_expressions_come_to_what_python_does(formula: Callable[[Any, Any, Any], Any]) -> None:
    expression, rng = expression_of(formula(X, Y, N)), random.Random(1)
    low, high = expression.span or (0, 0)
    for _ in range(300):
        values = values_of(rng)
        expected = formula(values["x"], values["y"], values["n"])
        assert ex.evaluate(expression, values.__getitem__) == expected
        assert low <= expected <= high


def test_equal_expressions_are_one() -> None:
    assert (X + Y).expression is (X + Y).expression
    assert ((X * 8) % 8, (X + 0).expression, (X * 1).expression) == (0, X.expression, X.expression)


def branchy(x: Any, y: Any, n: Any) -> Any:
    """Every kind of branch: nested, implied, without consequences."""
    if x < 0:
        return "below"
    if x > 5 and y == x:
        return "equal"
    limit = x * 0 + 3 if n >= 4 else 3  # no consequence
    if x <= 10 and not y:
        return "zero" if x >= -1 else "impossible"
    return limit + (n if y % 3 == 1 else 0)


def test_all_paths() -> None:
    def outcome() -> Any:
        found = branchy(X, Y, N)
        return found if isinstance(found, str) else expression_of(found)

    found, rng = diagram(outcome), random.Random(2)
    names = [o for o in explore.outcomes(found) if isinstance(o, str)]
    assert sorted(names) == ["below", "equal", "zero"]
    for _ in range(2000):
        values = values_of(rng)
        got = explore.outcome(found, values.__getitem__)
        got = got if isinstance(got, str) else ex.evaluate(got, values.__getitem__)
        assert got == branchy(values["x"], values["y"], values["n"])


def test_diagrams_are_reduced() -> None:
    assert diagram(lambda: {bool(X < Y): "same"}.popitem()[1]) == Leaf("same")
    assert diagram(lambda: "yes" if X < LOW else "no") == Leaf("no")  # by the span
    found = Reducer().diagram(explore.explore(lambda: "a" if X < 3 else "b" if X < 5 else "c"), lambda o: o.upper())
    assert [*explore.outcomes(found)] == ["A", "B", "C"]
    wanted = Reducer().diagram(
        explore.explore(lambda: "a" if X < 3 else "b" if Y < 5 else "b2"),
        lambda o: NEVER.outcome if o == "a" else o,
    )
    assert isinstance(wanted, Branch)
    assert wanted.condition is (Y < 5).expression


def test_nan_takes_the_path_that_python_takes() -> None:
    found = diagram(lambda: "in" if 1 <= R <= 2 else "out")
    for value, expected in ((1.5, "in"), (float("nan"), "out"), (float("inf"), "out")):
        assert explore.outcome(found, {"r": value}.__getitem__) == expected


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "MAX_PATHS", 50)
    for needs_value in (lambda: range(X), lambda: [1, 2][X], lambda: int(X), lambda: float(R), lambda: {X: 1}):
        with pytest.raises((CannotRecordError, TypeError)):
            needs_value()
    with pytest.raises(CannotRecordError, match="no path"):
        bool(X < Y)
    with pytest.raises(CannotRecordError, match="paths"):
        explore.explore(lambda: sum(i if X * i < Y else 0 for i in range(60)))
    with pytest.raises(ZeroDivisionError):
        explore.explore(lambda: X // Y if Y >= 0 else 0)


def test_texts_keep_their_numbers() -> None:
    with pytest.raises(ArgumentError) as caught:
        raise ArgumentError(explain("x", (X, 3), f"{N + 1} or {X:#x}"))
    first, (one, spec), *rest = pieces(str(caught.value))
    assert (first, one, spec) == ("x: got (", X.expression, "")
    assert rest[0] == ", 3), expected "
    assert rest[-2] == (X.expression, "#x")


def test_builtins_are_lent_and_given_back() -> None:
    def outcome() -> Any:
        least = choice.__dict__["min"](X, 3, Y)
        return expression_of(least)

    with patched_builtins(Apart(str)):
        assert diagram(outcome) == Leaf(ex.make(ex.LEAST, ex.make(ex.LEAST, X.expression, ex.integer(3)), Y.expression))
        assert choice.__dict__["max"]([4, 7, 5], key=lambda x: -x) == 4
        assert checks.check_factor("scale", 2) == 2.0
    assert "min" not in vars(choice)
    with pytest.raises(ArgumentError):
        checks.check_factor("scale", "two")


def test_checks_apart_are_rules() -> None:
    apart = Apart(lambda error: type(error).__name__)

    def outcome() -> Any:
        apart.begin()
        checks.check_flag("causal", X)
        apart.end()
        return "fine"

    with patched_builtins(apart):
        assert diagram(outcome) == Leaf("fine")
    (rule,) = apart.rules
    found = Reducer().diagram(rule)
    assert [explore.outcome(found, {"x": x}.__getitem__) for x in (0, 1, 2)] == [None, None, "ArgumentError"]


def test_checks_apart_are_made_on_every_path() -> None:
    apart = Apart(lambda error: type(error).__name__)

    def outcome() -> Any:
        apart.begin()
        if Y < 3:
            checks.check_flag("causal", X)
        apart.end()
        return "fine"

    with patched_builtins(apart), pytest.raises(CannotRecordError, match="some paths only"):
        explore.explore(outcome)
