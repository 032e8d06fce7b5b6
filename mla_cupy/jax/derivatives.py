"""Derivatives that do not exist: differentiation raises an error that names the functions with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from mla_cupy.errors import DTypeError, explain

_INSTEAD = (
    "put it, or what is made of it, in jax.lax.stop_gradient; in mla_cupy.jax mla_prefill, sparse_mla_forward, "
    "indexer_warmup_objective and indexer_sparse_objective have gradients, in reverse mode"
)


def constant(operation: str, run: Callable[..., Sequence[Any]], arrays: Mapping[str, Any]) -> Sequence[Any]:
    """`run(*arrays)`, which raises DTypeError when it is differentiated."""

    def refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        wanted = (name for name, tangent in zip(arrays, tangents, strict=True) if not is_zero(tangent))
        raise no_gradient(operation, next(wanted, "an input"))

    function = jax.custom_jvp(run)
    function.defjvp(refuse, symbolic_zeros=True)
    found: Sequence[Any] = function(*arrays.values())
    return found


def refuse(operation: str, cotangents: Mapping[str, Any]) -> None:
    """Raise DTypeError for results that have no gradient, if one is wanted."""
    for name, cotangent in cotangents.items():
        if not is_zero(cotangent):
            raise no_gradient(operation, name)


def values(primals: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays that a forward rule with symbolic zeros gets; None stays None."""
    return tuple(None if primal is None else primal.value for primal in primals)


def as_array(cotangent: Any) -> Any:
    """A cotangent as an array: zeros for an absent one."""
    if isinstance(cotangent, SymbolicZero):
        return jax.numpy.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def no_gradient(operation: str, argument: str) -> DTypeError:
    """The error for a derivative that does not exist."""
    return DTypeError(explain(argument, "a derivative", f"a constant: {operation} has no such gradient", _INSTEAD))


def is_zero(tangent: Any) -> bool:
    """Tell whether nothing is differentiated by it."""
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0
