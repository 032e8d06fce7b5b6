"""Axes of a mesh that arrays vary over inside `jax.shard_map`: JAX sums the gradients of those that do not vary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

Axes = frozenset[Any]


def axes_of(arrays: Iterable[Any]) -> Axes:
    """The axes of the mesh that any of the arrays varies over; None among them counts for nothing."""
    return frozenset().union(*(_axes(x) for x in arrays if x is not None))


def spread(arrays: Sequence[Any], axes: Axes) -> tuple[Any, ...]:
    """The arrays as ones that vary over all of these axes."""
    return tuple(None if x is None else _spread(x, axes - _axes(x)) for x in arrays)


def _axes(x: Any) -> Axes:
    if not hasattr(jax, "typeof"):  # JAX before 0.6 does not keep them
        return frozenset()
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    found: Axes = getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def _spread(x: Any, axes: Axes) -> Any:
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return jax.lax.pvary(x, tuple(axes))
