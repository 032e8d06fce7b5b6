"""Docstrings of the functions for JAX, attached when they are defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from mla_cupy import ops
from mla_cupy.ops import docstrings
from mla_cupy.ops.checks import explains_scale
from mla_cupy.ops.docstrings import (
    NO_GRADIENT_OF_DECODE,
    NO_GRADIENT_OF_HEAD_SUMS,
    OBJECTIVES,
    Docstring,
    Field,
    Text,
    Words,
)
from mla_cupy.ops.operation import Operation

_WORDS = Words("array", {r"\s*It is changed in place\.": ""}, donated=True)
_F = TypeVar("_F", bound=Callable[..., Any])

#: Parameters that only JAX's functions have.
_OWN = (
    Field(
        ("segment_ids_q",),
        "array, (s_q,), integers, optional",
        "In place of `packed`: queries attend to the keys with the same id. Tokens of one "
        "id are contiguous, and both sides use the same order of ids, or results are undefined; 0 and below is "
        "padding with results of 0. The device reads the ids, the host does not.",
    ),
    Field(
        ("segment_ids_kv",),
        "array, (s_kv,), integers, optional",
        "Ids of the keys. Default: the queries' ids.",
    ),
    Field(
        ("max_segments",),
        "int, optional",
        "Largest number of ids, without padding, on either side; tokens of further ids count as padding. Required "
        "with ids: each adds three sequences, and workspaces grow with the number of sequences.",
    ),
    Field(("deterministic",), "bool", "Make the gradients the same in every run: see `mla_cupy.{backward}`."),
    Field(("exportable",), "bool", "Allow `jax.export` to serialise the call: see `disabled_checks`."),
)

_RETURNED = "Donate the given array to `jax.jit`, and XLA changes it in place; otherwise it is copied first."

_TEXTS: dict[str, Text] = {
    **OBJECTIVES,
    "cache_append": Text(
        "Return a paged cache with more tokens: quantise, apply RoPE if requested, scatter by slot.",
        _RETURNED,
        examples="""\
>>> import functools, jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> @functools.partial(jax.jit, donate_argnums=0)
... def step(cache, q, latent, rope, slots, indices):
...     cache = mla.cache_append(latent, rope, cache, slots)
...     return cache, mla.sparse_mla_decode(q, cache, indices, scale=192**-0.5)[0]
>>> latent, rope = jnp.ones((2, 512), jnp.bfloat16), jnp.zeros((2, 64), jnp.bfloat16)
>>> q, slots = jnp.ones((1, 1, 8, 576), jnp.bfloat16), jnp.array([70, 5])
>>> cache, out = step(jnp.zeros((4, 64, 656), jnp.uint8), q, latent, rope, slots, jnp.array([[[5, -1, 70]]]))
>>> cache.shape, float(out[0, 0, 0, 0])
((4, 64, 656), 1.0)""",
    ),
    "cache_copy_pages": Text("Return a pool with pages copied in all of its layers.", _RETURNED),
    "indexer_cache_append": Text("Return a paged cache with more index keys.", _RETURNED),
    "indexer_head_sums": Text(
        more="In `jax.shard_map` over the heads, `jax.lax.psum` of it is what the losses take as `head_sums`.",
        notes=NO_GRADIENT_OF_HEAD_SUMS,
    ),
    "indexer_logits": Text(parameters={"clean": "If False, give `logits`: the rest of it stays."}),
    "indexer_sparse_loss": Text(
        notes="Derivatives do not go through it: `indexer_sparse_objective` is differentiable."
    ),
    "indexer_warmup_loss": Text(
        notes="Derivatives do not go through it: `indexer_warmup_objective` is differentiable."
    ),
    "mla_decode": Text(
        parameters={"tree_mask": "It has 64 bits, which JAX has with `jax_enable_x64` only."},
        notes=NO_GRADIENT_OF_DECODE,
        examples="""\
>>> import jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> q, cache = jnp.ones((1, 1, 16, 576), jnp.bfloat16), jnp.ones((4, 64, 576), jnp.bfloat16)
>>> table, seqlens = jnp.array([[2, 0]], jnp.int32), jnp.array([100], jnp.int32)
>>> out, lse = jax.jit(mla.mla_decode, static_argnames="scale")(q, cache, table, seqlens, scale=192**-0.5)
>>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
((1, 1, 16, 512), 1.0, 46.174)""",
    ),
    "mla_prefill": Text(
        notes="`out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask "
        "and unless arrays for them are given.",
        examples="""\
>>> import jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> q, v = jnp.ones((3, 4, 192), jnp.bfloat16), jnp.ones((3, 4, 128), jnp.bfloat16)
>>> loss = lambda v: mla.mla_prefill(q, jnp.ones_like(q), v)[0].astype(jnp.float32).sum()
>>> [round(float(x), 2) for x in jax.jit(jax.grad(loss))(v)[:, 0, 0]]  # of the queries: one, a half, a third
[1.84, 0.83, 0.33]""",
    ),
    "mla_prefill_backward": Text(
        more="`jax.grad` of the forward calls it; call it yourself with the merged results of chunks, say."
    ),
    "sparse_mla_backward": Text(
        more="`jax.grad` of the forward calls it; call it yourself for options that a gradient has no place for."
    ),
    "sparse_mla_decode": Text(notes=NO_GRADIENT_OF_DECODE),
    "sparse_mla_forward": Text(
        notes="`out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`, unless arrays for them "
        "are given; `max_logits` has no gradient.",
        examples="""\
>>> import jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> q, kv = jnp.ones((2, 16, 576), jnp.bfloat16), jnp.ones((100, 576), jnp.bfloat16)
>>> indices = jnp.array([[3, 70, -1], [5, -1, -1]], jnp.int32)
>>> loss = lambda kv: mla.sparse_mla_forward(q, kv, indices, scale=192**-0.5)[0].astype(jnp.float32).sum()
>>> gradient = jax.jit(jax.grad(loss))(kv)
>>> float(gradient[3, 0]), float(gradient[5, 0]), float(gradient[4, 0])
(8.0, 16.0, 0.0)""",
    ),
}


def documented(function: _F) -> _F:
    """Attach the docstring of the public function of that name, in JAX's words."""
    name = function.__name__
    parameters = inspect.signature(function).parameters
    if "scale" in parameters and parameters["scale"].default is inspect.Parameter.empty:
        explains_scale(function)
    loss = name.replace("_objective", "_loss")
    operation, text = ops.BOUND_OPERATIONS[loss], _TEXTS.get(name, Text())
    found = docstrings.of_function(function, operation, _WORDS, text)
    found = docstrings.of_objective(found, text, _WORDS.array) if name != loss else _with_changed(found, operation)
    known = {parameter for one in found.parameters for parameter in one.names}
    backward = f"{name.removesuffix('_forward')}_backward"
    own = [
        replace(one, text=one.text.format(backward=backward))
        for one in _OWN
        if one.names[0] in parameters and one.names[0] not in known
    ]
    function.__doc__ = replace(found, parameters=(*found.parameters, *own)).text()
    return function


def _with_changed(docstring: Docstring, operation: Operation) -> Docstring:
    """A docstring that also names the inputs that the operation changes: JAX's functions return them."""
    changed = [
        Field(
            (name,),
            "array, or None" if name in operation.optional else "array",
            "With the changes; in the old one's memory if that is donated.",
        )
        for name in operation.written[len(operation.outputs) :]
    ]
    return replace(docstring, returns=(*docstring.returns, *changed), notes=docstrings.filled(docstring.notes))
