"""Fewer garbage collections: most of what parsing, compiling and launching allocate stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_OBJECTS = 500_000
"""New objects after which a collection starts; Python's default is 700, and a thousand instructions have more."""


def seldom_collected(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function allocate many objects before garbage is collected."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first, *others = gc.get_threshold()
        gc.set_threshold(max(first, _OBJECTS) if first else 0, *others)
        try:
            return function(*args, **kwargs)
        finally:
            gc.set_threshold(first, *others)

    return call
