"""Devices of an axis: schedules for all ranks, and exchanges of rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel.zigzag import Segments, Zigzag, check_tokens, whole

Gradients = tuple[Any, ...]

# ---- Schedules ------------------------------------------------------------------------------------------------------


def check(zigzag: Zigzag, axis: str, arrays: dict[str, Any]) -> None:
    """Check that arrays have a device's number of rows, the same on all devices."""
    if not zigzag.is_even:
        remedy = "pad the sequences, as shards of an array have one size"
        raise ArgumentError(explain("zigzag.lengths", zigzag.lengths, f"multiples of {2 * zigzag.world}", remedy))
    world = jax.lax.axis_size(axis) if hasattr(jax.lax, "axis_size") else jax.lax.psum(1, axis)
    if world != zigzag.world:
        raise ArgumentError(explain("axis", f"{axis!r} of {world} devices", f"zigzag.world={zigzag.world} devices"))
    for name, x in arrays.items():
        if x is not None:
            check_tokens(name, x.shape[0], zigzag, 0)


def of_device(tables: Sequence[Any], axis: str) -> jax.Array:
    """Look up this device's array among the arrays of all ranks."""
    return jnp.asarray(np.stack(tables))[jax.lax.axis_index(axis)]


def packed(calls: Sequence[Segments], axis: str) -> Packed:
    """Starts of this device's sequences in a call."""
    return Packed(*(of_device([getattr(call, name) for call in calls], axis) for name in ("starts_q", "starts_kv")))


def rows_of(calls: Sequence[Segments]) -> slice:
    """The queries of a call, which are the same rows on every device."""
    return slice(calls[0].begin, calls[0].end)


def put(x: jax.Array, rows: slice, part: jax.Array) -> jax.Array:
    """Replace some rows. Of all rows JAX 0.11 makes a scatter without indices, which crashes its compiler."""
    return part if part.shape == x.shape else x.at[rows].set(part)


def bounds(zigzag: Zigzag, axis: str) -> tuple[jax.Array, jax.Array]:
    """`Zigzag.bounds` of this device."""
    first, last = zip(*(zigzag.bounds(rank) for rank in range(zigzag.world)), strict=True)
    return of_device(first, axis), of_device(last, axis)


# ---- Exchanges ------------------------------------------------------------------------------------------------------


def gathered(x: jax.Array, axis: str) -> jax.Array:
    """Rows of all devices, one device after another."""
    return jax.lax.all_gather(x, axis, tiled=True)


def scattered(gradients: jax.Array, axis: str, world: int) -> jax.Array:
    """Send the gradients of gathered rows to the rows' devices, which add them up in float32, in the devices' order."""
    received = jax.lax.all_to_all(gradients.reshape(world, -1, *gradients.shape[1:]), axis, 0, 0)
    return received.sum(0, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_rows(zigzag: Zigzag, axis: str, x: jax.Array) -> jax.Array:
    """Rows of all devices in the sequences' order; backward, the sums of their gradients."""
    return gathered(x, axis)[whole(zigzag, 0).order]


def _gather_forward(zigzag: Zigzag, axis: str, x: jax.Array) -> tuple[jax.Array, None]:
    return gather_rows(zigzag, axis, x), None


def _gather_backward(zigzag: Zigzag, axis: str, saved: None, gradient: jax.Array) -> Gradients:
    sent = jnp.zeros_like(gradient).at[whole(zigzag, 0).order].set(gradient)
    return (scattered(sent, axis, zigzag.world).astype(gradient.dtype),)


gather_rows.defvjp(_gather_forward, _gather_backward)
