"""Public functions that take the members of groups by their names inside the package, as tests list their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from mla_cupy.ops import COMPOSITE_OPERATIONS, OPERATIONS, POOL_OPERATIONS

_R = TypeVar("_R")


def flat(function: Callable[..., _R]) -> Callable[..., _R]:
    """A public function, or a binding's, with the members of groups in place of the groups."""
    known = {**OPERATIONS, **POOL_OPERATIONS, **COMPOSITE_OPERATIONS}
    operation = known[function.__name__.replace("_objective", "_loss")]

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> _R:
        return function(*args, **operation.grouped(arguments))

    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        members = operation.members(name)
        parameters |= {member: operation.parameters[member] for member in members} or {name: parameter}
    call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return call
