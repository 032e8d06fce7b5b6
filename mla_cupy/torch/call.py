"""Calls of operators, from the functions of this package: checks, derivatives, and which operator it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mla_cupy.arrays.torch import check_plain
from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.errors import ArgumentError, DTypeError, explain, kind_of
from mla_cupy.ops.checks import check_count, check_dtype, check_flag, check_float
from mla_cupy.ops.schema import lacking
from mla_cupy.torch.derivatives import (
    refuse,
    refuse_batches,
    refuse_beside,
    refuse_tangents,
    refuse_transforms,
    transformed,
)
from mla_cupy.torch.library import Operators

_MAX_INT64 = 2**63 - 1
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_is_compiling = torch.compiler.is_compiling


def call(
    operators: Operators,
    arrays: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    workspace: torch.Tensor | None = None,
    gradient: Callable[..., tuple[torch.Tensor, ...]] | None = None,
) -> tuple[Any, ...]:
    """Call an operator: the one that returns results, or the one that writes to the passed tensors.

    Parameters
    ----------
    operators : Operators
    arrays, options : tuple
        The operation's arrays and options, in its order.
    workspace : tensor, optional
    gradient : callable, optional
        The operation under transforms of torch.func, if it has a gradient.

    Returns
    -------
    tuple
        All results of the operation, in order; None for those that there are not.

    Raises
    ------
    DTypeError, ArgumentError
        If an argument is of another kind, or if a derivative is wanted that does not exist.
    """
    arguments, named = arguments_of(operators, arrays, options)
    wanted = wanted_results(operators, arguments, named)
    given = targets({name: named[name] for name in wanted})
    if given or operators.write is operators.make:
        refuse_batches(operators.operation.name, {**arguments, **given})
    if not given and workspace is not None:
        raise ArgumentError(explain("workspace", "a tensor", "None, unless tensors for the results are passed"))
    arguments, by_transform = _differentiable(operators, arguments, bool(given), gradient)
    arguments = with_dtypes(operators, arguments)
    if given:
        operators.write(**arguments, **given, workspace=check_kind("Tensor?", "workspace", workspace))
        return tuple(given.get(name) for name, _, _ in operators.outputs)
    made = (operators.make if by_transform is None else by_transform)(**arguments)
    found = made if isinstance(made, tuple) else (made,)
    return tuple(x if name in wanted else None for (name, _, _), x in zip(operators.outputs, found, strict=False))


def arguments_of(
    operators: Operators, arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name the arguments of an operation's operators, and the tensors for results.

    Outside compiled programs arguments are checked, and defaults are left out: the dispatcher takes time for each.
    PyTorch's own errors for wrong kinds of arguments differ from the package's.

    Raises
    ------
    DTypeError
        If there is something else where a tensor belongs.
    ArgumentError
        If an option is of another kind.
    """
    count, kinds, defaults = len(operators.inputs), operators.kinds, operators.defaults
    named = dict(zip((*operators.inputs, *operators.options), (*arrays[:count], *options), strict=True))
    results = {name: x for (name, _, _), x in zip(operators.outputs, arrays[count:], strict=True)}
    if _is_compiling():
        return named, results
    chosen = {key: x for key, x in named.items() if key not in defaults or _differ(x, defaults[key])}
    given = {name: None if x is None else _of_kind("Tensor", name, x) for name, x in results.items()}
    arguments = {key: _of_kind(kinds[key], key, x) for key, x in chosen.items()}
    _check_fakes({**arguments, **given})
    return arguments, given


def _check_fakes(given: Mapping[str, Any]) -> None:
    """Check that all tensors are fake if one is, unless their mode allows others."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    fakes = {name: x.fake_mode for name, x in tensors.items() if isinstance(x, FakeTensor)}
    real = next((name for name in tensors if name not in fakes), None)
    if real and fakes and not any(mode.allow_non_fake_inputs for mode in fakes.values()):
        expected = f"a fake one, like {next(iter(fakes))}"
        raise DTypeError(explain(real, "a tensor that is not fake", expected, "make it with the same FakeTensorMode"))


def _differ(value: Any, default: Any) -> bool:
    return value is not default and (type(value) is not type(default) or value != default)


def targets(given: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The tensors for results: all of them, or none."""
    there = {name: x for name, x in given.items() if x is not None}
    if 0 < len(there) < len(given):
        missing = next(name for name in given if name not in there)
        raise ArgumentError(explain(missing, None, f"a tensor, like {next(iter(there))}", "pass all results or none"))
    return there


def wanted_results(operators: Operators, arguments: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """The results of this call; tensors for others are rejected."""

    def is_set(option: str) -> bool:
        if option in operators.dtypes:
            return _dtype_name(option, arguments.get(option)) in BYTE_DTYPES
        return check_flag(option, arguments.get(option, operators.defaults[option]))

    wanted = []
    for name, needs, when in operators.outputs:
        reason = lacking(needs, when, arguments, is_set)
        if reason and results[name] is not None:
            raise ArgumentError(explain(name, "a tensor", f"None: {reason}"))
        if not reason:
            wanted.append(name)
    return wanted


def _differentiable(
    operators: Operators, arguments: dict[str, Any], given: bool, gradient: Callable[..., Any] | None
) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """The arguments, and the function to call instead of the operator under transforms of torch.func."""
    name = operators.operation.name
    if operators.operation.derivative == "constant":
        refuse_transforms(name, arguments)
        return detached(arguments), None
    if gradient is None or given:
        refuse(name, arguments)
        return arguments, None
    refuse_beside(name, arguments)
    refuse_tangents(name, arguments)
    return arguments, gradient if transformed() else None


def detached(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation with results that are constants to autograd."""
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


# ---- Kinds of arguments ---------------------------------------------------------------------------------------------


def with_dtypes(operators: Operators, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with all dtypes converted to PyTorch's, the only ones in a schema."""
    return {key: _dtype(key, value) if key in operators.dtypes else value for key, value in arguments.items()}


def _dtype(option: str, dtype: Any) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    named = _dtype_name(option, dtype)
    if not hasattr(torch, named):
        raise DTypeError(explain(option, repr(dtype), "a dtype that PyTorch has"))
    found: torch.dtype = getattr(torch, named)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dtype_name(option: str, dtype: Any) -> str | None:
    return check_dtype(option, dtype)


def check_kind(kind: str, key: str, value: Any) -> Any:
    """Check an argument outside compiled programs; returns it in the schema's form."""
    return value if _is_compiling() else _of_kind(kind, key, value)


def _of_kind(kind: str, key: str, value: Any) -> Any:
    if value is None and kind.endswith("?"):
        return value
    kind = kind.rstrip("?")
    if kind == "Tensor":
        if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):  # the second takes a microsecond
            raise DTypeError(explain(key, kind_of(value), "a tensor"))
        check_plain(value, key)
    elif isinstance(value, _SYMBOLS):
        return value
    elif kind == "int":
        return check_count(key, value, -_MAX_INT64 - 1, _MAX_INT64)
    elif kind == "bool":
        return check_flag(key, value)
    elif kind == "float":
        return check_float(key, value)
    elif kind == "str" and not isinstance(value, str):
        raise ArgumentError(explain(key, repr(value), "a name"))
    return value
