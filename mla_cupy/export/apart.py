"""Checks of single numbers, explored apart from the calls that make them.

A flag that may be 0 or 1, a number that may be infinite: such a check succeeds in several ways that come to the same.
Within a call each would double the paths of everything that follows. Explored alone, it is a rule of its own, and the
call goes on with what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from mla_cupy.errors import MlaError
from mla_cupy.export import numbers
from mla_cupy.export.explore import Path, explore
from mla_cupy.export.expressions import VARIABLE
from mla_cupy.export.numbers import CannotRecordError, Number

CHECKS = ("check_lse", "check_factor", "check_flag", "check_shard")
"""Checks of `ops.checks` that are about options alone."""


class Apart:
    """The checks of one procedure.

    Attributes
    ----------
    rules : list of paths
        Of each check: what it comes to is None, or what `refusal` makes of its error.
    """

    def __init__(self, refusal: Callable[[MlaError], Hashable]) -> None:
        self._refusal = refusal
        self._known: dict[Hashable, tuple[Any] | None] = {}
        self._used: set[Hashable] = set()
        self._always: set[Hashable] | None = None
        self.rules: list[list[Path]] = []

    def begin(self) -> None:
        """Begin a path."""
        self._used = set()

    def end(self) -> None:
        """End a path on which nothing is wrong.

        Raises
        ------
        CannotRecordError
            If it has not made the checks that others have: then they are no rules of all calls.
        """
        if self._always is None:
            self._always = self._used
        if self._always != self._used:
            raise CannotRecordError(f"checked on some paths only: {self._always ^ self._used}")

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The check, apart where it is about arguments of the call."""

        def checked(*args: Any) -> Any:
            given = tuple(_key(arg) for arg in args)
            if numbers.decide is numbers.undecided or not all(_is_plain(arg) for arg in args):
                return function(*args)
            key = function.__name__, *given
            if key not in self._known:
                self._known[key] = self._explored(function, args)
            found = self._known[key]
            if found is None:
                return function(*args)
            self._used.add(key)
            return found[0]

        return checked

    def _explored(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any] | None:
        """Result of a check, in a tuple, if it is one on all paths; then the check becomes a rule."""
        returned: list[Any] = []

        def outcome() -> Hashable:
            try:
                returned.append(function(*args))
            except MlaError as error:
                return self._refusal(error)
            return None

        paths = explore(outcome)
        if len({_key(value) for value in returned}) != 1:
            return None
        if len(paths) > 1:
            self.rules.append(paths)
        return (returned[0],)


def _key(value: Any) -> Hashable:
    """Key of a value: equal for values that are the same."""
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    return ("recorded", value.expression) if isinstance(value, Number) else (type(value).__name__, value)


def _is_plain(value: Any) -> bool:
    """True for an argument of the call, and for what is no recorded number."""
    return not isinstance(value, Number) or value.expression.op == VARIABLE
