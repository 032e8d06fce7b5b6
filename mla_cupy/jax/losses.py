"""Losses as differentiable scalars: their gradients are there already, and are multiplied by the cotangent."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mla_cupy.errors import DTypeError, ShapeError, explain
from mla_cupy.jax.derivatives import as_array, refuse, values
from mla_cupy.jax.lowering import call
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.bind import options_of
from mla_cupy.ops.indexer.loss_inputs import holds_codes

_SCORED = ("index_q", "index_k", "weights")
_STRAIGHT = ("values of index_q", "values of index_k")
"""What e4m3 codes stand for: not among the operation's arrays."""


class _Static(NamedTuple):
    """All that is no array; it can be hashed."""

    operation: str
    names: tuple[str, ...]
    options: Any
    exportable: bool


def objective(name: str, arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """sum(row_weights * kl) of the operation `name`, and kl; differentiable by the index queries, keys and weights.

    The arguments are the `locals()` of a function that has `options`, `exportable` and arrays.
    """
    arrays = dict(arguments)
    options, exportable = arrays.pop("options"), arrays.pop("exportable")
    straight = arrays.pop("straight_through")
    if straight is not None:
        for like, x in zip(_SCORED, straight, strict=False):
            _check_straight(like, x, arrays[like])
        arrays |= dict(zip(_STRAIGHT, straight, strict=True))
    static = _Static(name, tuple(arrays), options_of(OPERATIONS[name], options), exportable)
    value, kl = _objective(static, *arrays.values())
    return value, kl


def _leaves(static: _Static) -> tuple[str, ...]:
    """The arrays that take the gradients by index queries, keys and weights."""
    return (*_STRAIGHT, *_SCORED[2:]) if _STRAIGHT[0] in static.names else _SCORED


def _check_straight(name: str, x: jax.Array, like: jax.Array) -> None:
    argument = f"straight_through, of {name},"
    if x.shape != like.shape:
        raise ShapeError(explain(argument, x.shape, f"{like.shape}, like {name}"))
    if str(x.dtype) not in ("bfloat16", "float32"):
        raise DTypeError(explain(argument, x.dtype, "bfloat16 or float32"))


def _run(static: _Static, arrays: Sequence[Any], gradients: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    given = dict(zip(static.names, arrays, strict=True))
    options = {**static.options._asdict(), "gradients": gradients}
    ours = {name: x for name, x in given.items() if name not in _STRAIGHT}
    results = call(OPERATIONS[static.operation], ours, options, static.exportable)
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
    """None: what counts as a constant has no gradient."""
    value, kl = cotangents
    refuse("an indexer's objective", {"kl": kl})
    factor = as_array(value)
    there = ((name, x) for name, x in zip(_leaves(static), saved, strict=True) if x is not None)
    found = {name: gradient * factor.astype(gradient.dtype) for name, gradient in there}
    return tuple(found.get(name) for name in static.names)


_objective.defvjp(_save, _pull_back, symbolic_zeros=True)
