"""The gradient of the sparse forward."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from mla_cupy.jax.arguments import as_jax
from mla_cupy.jax.derivatives import as_array, is_zero, refuse, values
from mla_cupy.jax.lowering import call, run, signature_of
from mla_cupy.jax.varying import spread
from mla_cupy.ops import OPERATIONS
from mla_cupy.ops.checks import check_flag

_FORWARD, _BACKWARD = OPERATIONS["sparse_mla_forward"], OPERATIONS["sparse_mla_backward"]
_INPUTS = tuple(array.name for array in _FORWARD.inputs)
_SHARED = ("scale", "causal", "relative", "lse_base")
"""Options that forward and backward share."""


class _Static(NamedTuple):
    """Arguments that are no arrays; they can be hashed."""

    options: Any
    deterministic: bool
    exportable: bool


def differentiable(
    arrays: tuple[jax.Array | None, ...], options: tuple[Any, ...], deterministic: bool, exportable: bool
) -> tuple[Any, ...]:
    """Run the sparse forward, with a gradient through its first two results unless there are arrays for results."""
    deterministic, exportable = check_flag("deterministic", deterministic), check_flag("exportable", exportable)
    if any(x is not None for x in arrays[len(_INPUTS) :]):
        return run(_FORWARD, arrays, options, exportable)
    given = {name: as_jax(name, x) for name, x in zip(_INPUTS, arrays, strict=False)}
    resolved = signature_of(_FORWARD, given, _FORWARD.options(*options)._asdict()).options
    static = _Static(resolved, deterministic, exportable)
    found: tuple[Any, ...] = _sparse(static, *spread(given.values()))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sparse(static: _Static, *arrays: Any) -> tuple[Any, ...]:
    given = dict(zip(_INPUTS, arrays, strict=True))
    return call(_FORWARD, given, static.options._asdict(), static.exportable)


def _save(static: _Static, *primals: Any) -> tuple[tuple[Any, ...], Any]:
    arrays = values(primals)
    out, lse, max_logits = _sparse(static, *arrays)
    return (out, lse, max_logits), (arrays, out, lse)


def _pull_back(static: _Static, saved: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    of_out, of_lse, of_logits = gradients
    refuse(_FORWARD.name, {"max_logits": of_logits})
    arrays, out, lse = saved
    given = dict(zip(_INPUTS, arrays, strict=True))
    given |= {"out": out, "lse": lse, "dout": as_array(of_out).astype(given["q"].dtype)}
    if not is_zero(of_lse):
        given["dlse"] = of_lse
    options = {name: getattr(static.options, name) for name in _SHARED}
    options["deterministic"] = static.deterministic
    dq, dkv, d_sink = call(_BACKWARD, given, options, static.exportable)
    found = {"q": dq, "kv": dkv, "attn_sink": d_sink}
    return tuple(found.get(name) for name in _INPUTS)  # None: integers have no gradient


_sparse.defvjp(_save, _pull_back, symbolic_zeros=True)
