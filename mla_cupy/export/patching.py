"""Builtins that take recorded numbers, patched into the modules that decide about calls while a call is recorded.

Python's `min(b, 8)` would compare, and a comparison forks the path; `float(scale)` would need a value. Patched, the
first becomes one expression, and the second returns a recorded number as it is. Everything else goes to Python's own.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mla_cupy.export import expressions as ex
from mla_cupy.export import numbers
from mla_cupy.export.apart import CHECKS, Apart
from mla_cupy.export.numbers import Integer, Number, Real, Truth
from mla_cupy.ops import checks

_MISSING = object()
_PATCHED_MODULES = ("mla_cupy.arrays.view", "mla_cupy.kernels", "mla_cupy.ops", "mla_cupy.runtime.tensormap")


class _Replacement(type):
    """The type of classes that stand for builtin ones: `own` decides about everything but recorded numbers."""

    own: Any
    recorded: type

    def __instancecheck__(cls, x: object) -> bool:
        return builtins.isinstance(x, (cls.own, cls.recorded))


class _Int(metaclass=_Replacement):
    own, recorded = builtins.int, Integer

    def __new__(cls, x: Any = 0, *more: Any) -> Any:
        if isinstance(x, Real):
            return numbers.number_of(ex.make(ex.TRUNCATE, x.expression))
        if isinstance(x, (Integer, Truth)):
            return numbers.number_of(numbers.expression_of(x))
        return builtins.int(x, *more)


class _Float(metaclass=_Replacement):
    own, recorded = builtins.float, Real

    def __new__(cls, x: Any = 0.0) -> Any:
        return numbers.to_real(x) if isinstance(x, (Number, Truth)) else builtins.float(x)


class _Bool(metaclass=_Replacement):
    own, recorded = builtins.bool, Truth

    def __new__(cls, x: Any = False) -> Any:
        if isinstance(x, Truth):
            return x
        if isinstance(x, Number):
            zero = ex.make(ex.EQUAL, *numbers._alike(x, 0))
            return Integer(ex.make(ex.WHERE, zero, ex.integer(0), ex.integer(1)))
        return builtins.bool(x)


def _extremum(op: str, own: Any) -> Any:
    def chosen(*args: Any, **options: Any) -> Any:
        values = list(args[0] if len(args) == 1 else args)
        if options or not any(isinstance(value, Number) for value in values):
            return own(*args if len(args) > 1 else (values,), **options)
        return numbers.extremum(op, values)

    return chosen


def _hex(x: Any) -> str:
    return f"{x:#x}"


_BUILTINS = {
    "int": _Int,
    "float": _Float,
    "bool": _Bool,
    "min": _extremum(ex.LEAST, builtins.min),
    "max": _extremum(ex.GREATEST, builtins.max),
    "hex": _hex,
}


@contextmanager
def patched_builtins(apart: Apart) -> Iterator[None]:
    """Patch the builtins, and some checks as rules apart, into the loaded modules, within a with statement.

    No other thread may call the package meanwhile.
    """
    given = dict(_BUILTINS)
    checks_apart = {name: (own, apart.of(own)) for name in CHECKS if (own := getattr(checks, name))}
    replaced: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if any(name == each or name.startswith(f"{each}.") for each in _PATCHED_MODULES):
            names = vars(module)
            replaced += [(module, builtin, _MISSING) for builtin in given if builtin not in names]
            replaced += [(module, check, own) for check, (own, _) in checks_apart.items() if names.get(check) is own]
    given |= {name: check for name, (_, check) in checks_apart.items()}
    for module, name, _ in replaced:
        setattr(module, name, given[name])
    try:
        yield
    finally:
        for module, name, own in replaced:
            delattr(module, name) if own is _MISSING else setattr(module, name, own)
