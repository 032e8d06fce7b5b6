"""The gradient of dense attention with keys and values per head."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import name_of
from mla_cupy.jax.arguments import as_jax
from mla_cupy.jax.derivatives import as_array, is_zero, values
from mla_cupy.jax.lowering import call, run, signature_of
from mla_cupy.jax.segments import Segments, with_starts
from mla_cupy.jax.varying import spread
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.checks import check_flag

_FORWARD, _BACKWARD = OPERATIONS["mla_prefill"], OPERATIONS["mla_prefill_backward"]
_INPUTS = tuple(array.name for array in _FORWARD.inputs)
_WITHOUT = ("mask", "out", "lse")
"""The arrays with which there is no gradient."""
_STATE = ("state_out", "state_lse")
_GRADIENTS = ("q", "k", "v", "q_rope", "k_rope")
_SHARED = ("causal", "scale")
"""Options that forward and backward share."""


class _Static(NamedTuple):
    """Arguments that are no arrays; they can be hashed."""

    options: Any
    deterministic: bool
    exportable: bool


def differentiable(
    arrays: tuple[jax.Array | None, ...],
    options: tuple[Any, ...],
    deterministic: bool,
    exportable: bool,
    *segments: Any,
) -> tuple[Any, ...]:
    """Run the forward, with a gradient except with a mask, with arrays for results, or with codes."""
    deterministic, exportable = check_flag("deterministic", deterministic), check_flag("exportable", exportable)
    given = dict(zip(_FORWARD.names, arrays, strict=True))
    coded = name_of(getattr(given["q"], "dtype", "")) in BYTE_DTYPES
    named = {name: as_jax(name, given[name]) for name in _INPUTS}
    named = with_starts(named, Segments(*segments))
    if coded or any(given[name] is not None for name in _WITHOUT):
        return run(_FORWARD, tuple((given | named).values()), options, exportable)
    resolved = signature_of(_FORWARD, named, _FORWARD.options(*options)._asdict()).options
    static = _Static(resolved, deterministic, exportable)
    found: tuple[Any, ...] = _prefill(static, *spread(named.values()))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefill(static: _Static, *arrays: Any) -> tuple[Any, ...]:
    given = dict(zip(_INPUTS, arrays, strict=True))
    return call(_FORWARD, given, static.options._asdict(), static.exportable)


def _save(static: _Static, *primals: Any) -> tuple[tuple[Any, ...], Any]:
    arrays = values(primals)
    out, lse = _prefill(static, *arrays)
    return (out, lse), (arrays, out, lse)


def _pull_back(static: _Static, saved: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    arrays, out, lse = saved
    dout, dlse = as_array(gradients[0]), None if is_zero(gradients[1]) else gradients[1]
    given = dict(zip(_INPUTS, arrays, strict=True))
    state_out, state_lse = (given.pop(name) for name in _STATE)
    found = {} if state_out is None else _of_state(state_out, state_lse, out, lse, dout, dlse)
    given |= {"out": out, "lse": lse, "dout": dout.astype(given["q"].dtype), "dlse": dlse}
    options = {name: getattr(static.options, name) for name in _SHARED}
    options["deterministic"] = static.deterministic
    made = call(_BACKWARD, given, options, static.exportable)
    found |= zip(_GRADIENTS, made, strict=True)
    return tuple(found.get(name) for name in _INPUTS)  # None: integers have no gradient


def _of_state(state_out: Any, state_lse: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> dict[str, Any]:
    """Gradients of the state that was merged into the result with the weight exp(its lse - lse).

    Of a weight of 1 the result's values are the state's, but rounded: their difference would be noise.
    """
    empty = jnp.isinf(state_lse)
    weight = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, state_lse) - jnp.where(empty, 0, lse)))
    of_values = jnp.where(empty[..., None], 0, state_out).astype(jnp.float32)
    wide = dout.astype(jnp.float32)
    d_lse = jnp.where(state_lse == lse, 0, (wide * (of_values - out.astype(jnp.float32))).sum(-1))
    d_lse = weight * (d_lse if dlse is None else d_lse + dlse)
    return {"state_out": (weight[..., None] * wide).astype(state_out.dtype), "state_lse": d_lse}


_prefill.defvjp(_save, _pull_back, symbolic_zeros=True)
