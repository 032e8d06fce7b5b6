"""Check that an engine's interface is one that a plugin can serve.

Engines change their interfaces with most releases: parameters are added, reordered, renamed. The test is whether each
call that the engine may make of its own method also reaches ours with the same meaning. So signatures are not compared
by their spelling: calls are bound to them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

logger = logging.getLogger("mla_cupy")

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_Call = tuple[list[str], dict[str, str]]


def misfit(ours: Callable[..., Any], theirs: Callable[..., Any], *, shortest_only: bool = False) -> str:
    """Explain why `ours` does not accept the calls that `theirs` accepts; "" if it does.

    Parameters
    ----------
    ours : callable
        What is called in place of `theirs`. Parameters that it does not name may go to its * and **: it ignores them.
    theirs : callable
        The engine's own. If it takes anything, by * or **, its parameters say nothing of the calls.
    shortest_only : bool
        Leave out what may be left out: for constructors, which an engine calls as its abstract classes say, whatever
        else a base class of ours can be told.

    Returns
    -------
    str
    """
    parameters = list(inspect.signature(theirs).parameters.values())
    if any(x.kind in _VARIADIC for x in parameters):
        return ""
    wanted = inspect.signature(ours)
    for positional, named in _calls(parameters, shortest_only):
        try:
            bound = wanted.bind(*positional, **named)
        except TypeError as error:
            names = ", ".join(x.name for x in parameters)
            return f"takes {names}, which ours cannot be called with: {error}"
        for name, value in bound.arguments.items():
            if wanted.parameters[name].kind not in _VARIADIC and name != value:
                return f"passes {value} where ours takes {name}"
    return ""


def _calls(parameters: list[Parameter], shortest_only: bool) -> Iterator[_Call]:
    """The calls at the corners: all or only what is required, by position or by name. Each value is its own name."""
    required = [x for x in parameters if x.default is Parameter.empty]
    for given in (required,) if shortest_only else (parameters, required):
        for by_position in (True, False):
            allowed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)[: 1 + by_position]
            positional = [x.name for x in given if x.kind in allowed]
            yield positional, {x.name: x.name for x in given if x.kind not in allowed}


def overridden(ours: type, *needed: str) -> str:
    """Say which method of a class does not fit the one that it overrides; "" if each does.

    Parameters
    ----------
    ours : type
    *needed : str
        Methods that must override something: if the engine has another name for one, it never calls ours.
    """
    for name in needed:
        if _inherited(ours, name) is None:
            return f"{ours.__mro__[1].__name__} has no {name}"
    for name, method in vars(ours).items():
        theirs = _inherited(ours, name)
        if theirs is None or not callable(getattr(ours, name)) or isinstance(method, type):
            continue
        found = misfit(getattr(ours, name), theirs, shortest_only=name == "__init__")
        if found:
            return f"{ours.__mro__[1].__name__}.{name} {found}"
    return ""


def _inherited(ours: type, name: str) -> Callable[..., Any] | None:
    """The inherited method of a class without its own; None if there is none but `object`'s."""
    for base in ours.__mro__[1:-1]:
        if name in vars(base):
            found = getattr(base, name)
            return found if callable(found) else None
    return None


def absent(owner: object, *names: str) -> str:
    """Say which of these attributes an object does not have; "" if it has all."""
    label = getattr(owner, "__name__", repr(owner))
    return next((f"{label} has no {name}" for name in names if not hasattr(owner, name)), "")


def refused(function: Callable[..., Any], *arguments: object) -> str:
    """Say why a function cannot be called with these arguments by position; "" if it can."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return f"{getattr(function, '__name__', function)}: {error}"
    return ""


def offer(engine: str, probe: Callable[[], str], register: Callable[[], None]) -> bool:
    """Register if the probe finds no difference; otherwise log the reason in one line.

    Returns
    -------
    bool
        Whether it is registered.
    """

    def attempt() -> str:
        register()
        return ""

    found = explained(probe) or explained(attempt)
    if found:
        logger.warning("mla_cupy is no attention backend for this %s: %s", engine, found)
    return not found


def explained(probe: Callable[[], str]) -> str:
    """Run a probe; a missing module or name is a difference, too."""
    try:
        return probe()
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def attribute(module: str, name: str) -> Any:
    """Import a module's attribute.

    Raises
    ------
    ImportError, AttributeError
        If there is no such module, or nothing of that name.
    """
    return getattr(importlib.import_module(module), name)
