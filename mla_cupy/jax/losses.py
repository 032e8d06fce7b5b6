"""Losses as differentiable scalars: their gradients are there already, and are multiplied by the cotangent."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mla_cupy.jax.derivatives import as_array, refuse, values
from mla_cupy.jax.lowering import call
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.bind import options_of

_LEAVES = ("index_q", "index_k", "weights")


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
    static = _Static(name, tuple(arrays), options_of(OPERATIONS[name], options), exportable)
    value, kl = _objective(static, *arrays.values())
    return value, kl


def _run(static: _Static, arrays: Sequence[Any], gradients: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    given = dict(zip(static.names, arrays, strict=True))
    options = {**static.options._asdict(), "gradients": gradients}
    results = call(OPERATIONS[static.operation], given, options, static.exportable)
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
    own = tuple(made.astype(given[name].dtype) for name, made in zip(_LEAVES, gradients, strict=True))
    return (value, kl), own


def _pull_back(static: _Static, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    """None: what counts as a constant has no gradient."""
    value, kl = cotangents
    refuse("an indexer's objective", {"kl": kl})
    factor = as_array(value)
    found = {name: gradient * factor.astype(gradient.dtype) for name, gradient in zip(_LEAVES, saved, strict=True)}
    return tuple(found.get(name) for name in static.names)


_objective.defvjp(_save, _pull_back, symbolic_zeros=True)
