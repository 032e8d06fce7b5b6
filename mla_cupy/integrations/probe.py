"""Check that an engine's interface is the one that a plugin was written for."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger("mla_cupy")

Parameters = tuple[str, ...]


def difference(owner: object, wanted: Mapping[str, Parameters]) -> str:
    """Differences of the owner's methods from those `wanted`, which maps names to parameters; "" if they do not."""
    label = getattr(owner, "__name__", repr(owner))
    for name, parameters in wanted.items():
        method = getattr(owner, name, None)
        if method is None:
            return f"{label} has no {name}"
        found = tuple(inspect.signature(method).parameters)
        if found != parameters:
            return f"{label}.{name} takes {', '.join(found)} instead of {', '.join(parameters)}"
    return ""


def offer(engine: str, probe: Callable[[], str], register: Callable[[], None]) -> None:
    """Register if the probe finds no difference; otherwise log one line that says why not."""
    try:
        found = probe()
        if not found:
            register()
    except (ImportError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        logger.warning("mla_cupy is no attention backend for this %s: %s", engine, found)


def attribute(module: str, name: str) -> object:
    """Import a module's attribute.

    Raises
    ------
    ImportError, AttributeError
        If there is no such module, or nothing of that name.
    """
    found: object = getattr(importlib.import_module(module), name)
    return found
