"""Losses as differentiable scalars: their gradients are already computed, and the backward multiplies them by the
cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.jax.arguments import as_jax
from mla_cupy.jax.derivatives import as_array, refuse, values
from mla_cupy.jax.lowering import call
from mla_cupy.jax.varying import spread
from mla_cupy.ops.bind import options_of
from mla_cupy.ops.checks import check_flag
from mla_cupy.ops.indexer.loss_inputs import holds_codes
from mla_cupy.ops.operation import Operation

_SCORED = ("index_q", "index_k", "weights")
_STRAIGHT = ("values of index_q", "values of index_k")
"""Names for the numbers that e4m3 codes represent, which are not among the operation's arrays."""


class _Static(NamedTuple):
    """Arguments that are no arrays; they can be hashed."""

    operation: Operation
    names: tuple[str, ...]
    options: Any
    exportable: bool


def objective(
    operation: Operation,
    arrays: tuple[jax.Array | None, ...],
    options: tuple[Any, ...],
    straight_through: tuple[jax.Array, jax.Array] | None,
    exportable: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run a loss for sum(row_weights * kl) and kl.

    The sum is differentiable by index_q, index_k and weights, or by their straight-through arrays.

    Parameters
    ----------
    operation : Operation
        The loss.
    arrays, options : tuple
        Its inputs and options, in its order; `gradients` is decided here.
    straight_through : (array, array), optional
        What e4m3 codes stand for.
    exportable : bool

    Returns
    -------
    objective, kl : array
    """
    inputs = (array.name for array in operation.inputs)
    given = {name: as_jax(name, x) for name, x in zip(inputs, arrays, strict=True)}
    if straight_through is not None:
        given |= dict(zip(_STRAIGHT, _checked(straight_through, given), strict=True))
    resolved = options_of(operation, operation.options(*options)._asdict())
    static = _Static(operation, tuple(given), resolved, check_flag("exportable", exportable))
    value, kl = _objective(static, *spread(given.values()))
    return value, kl


def _leaves(static: _Static) -> tuple[str, ...]:
    """The arrays that take the gradients by index queries, keys and weights."""
    return (*_STRAIGHT, *_SCORED[2:]) if _STRAIGHT[0] in static.names else _SCORED


def _checked(straight_through: Any, given: Mapping[str, Any]) -> Iterator[jax.Array]:
    if not isinstance(straight_through, (tuple, list)) or len(straight_through) != 2:
        raise ArgumentError(explain("straight_through", repr(straight_through), "two arrays, of index_q and index_k"))
    for name, x in zip(_SCORED, straight_through, strict=False):
        argument = f"straight_through, of {name},"
        if x is None or given[name] is None:
            raise DTypeError(explain(argument if x is None else name, "None", "an array of JAX or NumPy"))
        array, like = as_jax(argument, x), given[name]
        if array.shape != like.shape:
            raise ShapeError(explain(argument, array.shape, f"{like.shape}, like {name}"))
        if str(array.dtype) not in ("bfloat16", "float32"):
            raise DTypeError(explain(argument, array.dtype, "bfloat16 or float32"))
        yield array


def _run(static: _Static, arrays: Sequence[Any], gradients: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    given = dict(zip(static.names, arrays, strict=True))
    options = {**static.options._asdict(), "gradients": gradients}
    ours = {name: x for name, x in given.items() if name not in _STRAIGHT}
    results = call(static.operation, ours, options, static.exportable)
    kl, factors = results[0], given["row_weights"]
    value = (kl if factors is None else kl * factors.reshape(-1, *[1] * (kl.ndim - 1))).sum()
    return value, kl, results[3:6]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(static: _Static, *arrays: Any) -> tuple[Any, Any]:
    value, kl, _ = _run(static, arrays, gradients=False)
    return value, kl


def _save(static: _Static, *primals: Any) -> tuple[tuple[Any, Any], Any]:
    arrays = values(primals)
    value, kl, gradients = _run(static, arrays, gradients=True)
    given = dict(zip(static.names, arrays, strict=True))
    own = tuple(
        None if holds_codes(str(given[name].dtype)) else made.astype(given[name].dtype)
        for name, made in zip(_leaves(static), gradients, strict=True)
    )
    return (value, kl), own


def _pull_back(static: _Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """Multiply the gradients by the cotangent; None for constants."""
    value, kl = cotangents
    refuse("an indexer's objective", {"kl": kl})
    factor = as_array(value)
    there = ((name, x) for name, x in zip(_leaves(static), saved, strict=True) if x is not None)
    found = {name: gradient * factor.astype(gradient.dtype) for name, gradient in there}
    return tuple(found.get(name) for name in static.names)


_objective.defvjp(_save, _pull_back, symbolic_zeros=True)
