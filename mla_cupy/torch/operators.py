"""The operators of all operations, and how a public function calls the one that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.errors import ArgumentError, DTypeError, explain
from mla_cupy.ops.bind import parameters
from mla_cupy.ops.checks import check_dtype
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
    check = refuse_tangents if name in DIFFERENTIABLE and not given else refuse
    check(name, {**dict(zip(_NAMES[name], inputs, strict=False)), **options})
    options = with_dtypes(name, options)
    if given:
        write(*inputs, **options, **given, workspace=workspace)
        return tuple(given.values())
    if workspace is not None:
        raise ArgumentError(explain("workspace", "a tensor", "None, unless tensors for the results are given, too"))
    return make(*inputs, **options)  # type: ignore[no-any-return]
