"""The operators of all operations, and how a public function calls the one that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.arrays.torch import check_dense
from mla_cupy.errors import ArgumentError, DTypeError, explain
from mla_cupy.ops.bind import parameters
from mla_cupy.ops.checks import check_count, check_dtype, check_flag, check_float
from mla_cupy.torch.derivatives import DIFFERENTIABLE, refuse, refuse_tangents
from mla_cupy.torch.library import bind

OPERATORS = {name: bind(operation) for name, operation in ops.BOUND_OPERATIONS.items()}
"""For each operation the operator that returns new tensors, and the one that writes to given ones."""
_NAMES = {name: tuple(parameters(name)) for name in OPERATORS}
_DTYPES = {
    name: {output.dtype_option for output in operation.outputs} for name, operation in ops.BOUND_OPERATIONS.items()
}


def single(results: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """An operator of one result returns it bare where it makes it, and as a tuple where it is given."""
    return results[0] if isinstance(results, tuple) else results


def targets(**given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors for results: all of them, or none."""
    there = {name: x for name, x in given.items() if x is not None}
    if 0 < len(there) < len(given):
        missing = next(name for name in given if name not in there)
        raise ArgumentError(explain(missing, None, f"a tensor, like {next(iter(there))}", "give all results or none"))
    return there


def with_dtypes(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, with dtypes in any form as PyTorch's, which is all that a schema takes."""
    return {key: _dtype(key, value) if key in _DTYPES[name] else value for key, value in options.items()}


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


def check_kinds(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator, those that are numbers as Python's: all that a schema takes.

    PyTorch's own errors, of arguments of other kinds, are not those of the package.

    Raises
    ------
    DTypeError
        If there is something else where a tensor belongs.
    ArgumentError
        If an option is of another kind.
    """
    if _is_compiling():
        return dict(given)
    return {key: _of_kind(name, key, value) for key, value in given.items()}


def _of_kind(name: str, key: str, value: Any) -> Any:
    if key not in _KINDS[name]:
        raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
    kind, optional = _KINDS[name][key]
    if value is None and optional:
        return value
    if kind == "tensor":
        if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):  # the second takes a microsecond
            raise DTypeError(explain(key, f"a {type(value).__name__}", "a tensor"))
        check_dense(value, key)
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


def _kind(name: str, key: str, annotation: str, default: Any) -> tuple[str, bool]:
    """What an argument is, and whether it may be None."""
    if key in _OPERATIONS[name].names:
        return "tensor", default is None
    kind, _, optional = annotation.partition(" | ")
    return kind, optional == "None"


_OPERATIONS = ops.BOUND_OPERATIONS
_MAX_INT64 = 2**63 - 1
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_is_compiling = torch.compiler.is_compiling
_KINDS = {
    name: {key: _kind(name, key, taken.annotation, taken.default) for key, taken in parameters(name).items()}
    for name in OPERATORS
}
"""Of each operation the kinds of its arguments, and whether they may be None."""


def run(
    name: str,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    given: dict[str, torch.Tensor],
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Call an operator: the one that returns results, or the one that writes to `given`.

    Raises
    ------
    DTypeError
        If a derivative is wanted that does not exist.
    """
    make, write = OPERATORS[name]
    inputs = tuple(check_kinds(name, dict(zip(_NAMES[name], inputs, strict=False))).values())
    options = check_kinds(name, options)
    check = refuse_tangents if name in DIFFERENTIABLE and not given else refuse
    check(name, {**dict(zip(_NAMES[name], inputs, strict=False)), **options})
    options = with_dtypes(name, options)
    if given:
        write(*inputs, **options, **given, workspace=workspace)
        return tuple(given.values())
    if workspace is not None:
        raise ArgumentError(explain("workspace", "a tensor", "None, unless tensors for the results are given, too"))
    return make(*inputs, **options)  # type: ignore[no-any-return]
