"""Axes of a mesh that arrays vary over inside `jax.shard_map`.

JAX assumes that an array that does not vary is equal on all devices, and sums its gradients over them. It cannot see
what a custom call reads: the results vary over all axes that any operand varies over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

Axes = frozenset[Any]


def spread(arrays: Iterable[Any], like: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Let arrays vary over all axes of the mesh that any of them, or of `like`, varies over; None stays None."""
    arrays = tuple(arrays)
    axes: Axes = frozenset().union(*(_axes(x) for x in (*arrays, *like) if x is not None))
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
