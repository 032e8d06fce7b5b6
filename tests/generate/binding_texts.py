"""Texts of the bindings' docstrings beside those of the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Losses with a form that is differentiable: its name, and the inputs of the loss that it has not.
OBJECTIVES = {
    "indexer_sparse_loss": ("indexer_sparse_objective", ()),
    "indexer_warmup_loss": ("indexer_warmup_objective", ("v",)),
}


@dataclass(frozen=True)
class Text:
    """For one function: all of it is optional.

    Attributes
    ----------
    summary : str
        In place of the public function's first line.
    more : str
        After what that function says before its parameters.
    parameters : mapping
        What is added to a parameter's text, by its name, or the first of several.
    notes, examples : str
        Those sections.
    """

    summary: str = ""
    more: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    examples: str = ""


_DECODE = "It has no gradient: decode serves inference."
_CONSTANT = "Derivatives do not go through it: `{0}` is differentiable."
_HEAD_SUMS = "It has no gradient: nothing flows to the main attention."
_DETERMINISTIC = "The gradients are deterministic under `torch.use_deterministic_algorithms(True)`."

_OBJECTIVE = {
    "indexer_sparse_objective": (
        "Compute sum(row_weights * kl) of the loss over selected keys, differentiable by indexer and weights.",
        "The loss is that of `indexer_sparse_loss`. Its gradients by index_q, index_k and weights are made with it; "
        "the backward multiplies them by the cotangent, in the dtypes of the arrays. Everything else counts as a "
        "constant.",
    ),
    "indexer_warmup_objective": (
        "Compute sum(row_weights * kl) of the warm-up loss, differentiable by indexer and weights.",
        "The loss is that of `indexer_warmup_loss`. Its gradients by index_q, index_k and weights are made with it: "
        "its larger part, the scores of the main attention, is not repeated. The backward multiplies them by the "
        "cotangent, in the dtypes of the arrays. Everything else counts as a constant.",
    ),
}
_MEAN = {"row_weights": "For a mean, 1 / s_q."}
_OBJECTIVES = {name: Text(summary, more, _MEAN) for name, (summary, more) in _OBJECTIVE.items()}

TORCH: dict[str, Text] = {
    **_OBJECTIVES,
    "indexer_head_sums": Text(notes=_HEAD_SUMS),
    "indexer_sparse_loss": Text(notes=_CONSTANT.format("indexer_sparse_objective")),
    "indexer_warmup_loss": Text(notes=_CONSTANT.format("indexer_warmup_objective")),
    "cache_append": Text(notes="No gradient flows through the cache."),
    "mla_prepare": Text(notes=_DECODE),
    "mla_decode": Text(
        notes=_DECODE,
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, cache = torch.ones(1, 1, 16, 576).bfloat16(), torch.ones(4, 64, 576).bfloat16()
>>> table, seqlens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
>>> out, lse = mla.mla_decode(q, cache, table, seqlens)
>>> tuple(out.shape), float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
((1, 1, 16, 512), 1.0, 28.605)""",
    ),
    "mla_prefill": Text(
        notes="`out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask "
        f"and unless tensors for them are given. {_DETERMINISTIC}",
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, v = torch.ones(3, 4, 192).bfloat16(), torch.ones(3, 4, 128).bfloat16().requires_grad_()
>>> out, lse = mla.mla_prefill(q, torch.ones_like(q), v)
>>> out.sum().backward()
>>> [round(float(x), 2) for x in v.grad[:, 0, 0]]  # of the queries: one, a half, a third
[1.84, 0.83, 0.33]""",
    ),
    "mla_prefill_backward": Text(
        more="Autograd calls it; call it yourself to say where the gradients go, such as dk and dv to one tensor."
    ),
    "sparse_mla_backward": Text(more="Autograd calls it; call it yourself for options that autograd has no place for."),
    "sparse_mla_decode": Text(
        notes=_DECODE,
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
>>> mla.cache_append(torch.ones(2, 512).half(), torch.zeros(2, 64).half(), cache, torch.tensor([70, 5]))
>>> q, indices = torch.ones(1, 1, 8, 576).half(), torch.tensor([[[5, -1, 70]]], dtype=torch.int32)
>>> out, lse = mla.sparse_mla_decode(q, cache, indices)
>>> float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
(1.0, 22.026)""",
    ),
    "sparse_mla_forward": Text(
        notes="`out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`, unless tensors for them "
        f"are given; `max_logits` has no gradient. {_DETERMINISTIC}",
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, kv = torch.ones(2, 16, 576).bfloat16(), torch.ones(100, 576).bfloat16().requires_grad_()
>>> indices = torch.tensor([[3, 70, -1], [5, -1, -1]], dtype=torch.int32)
>>> out, lse, max_logits = mla.sparse_mla_forward(q, kv, indices)
>>> out.sum().backward()
>>> float(kv.grad[3, 0]), float(kv.grad[5, 0]), float(kv.grad[4, 0])
(8.0, 16.0, 0.0)""",
    ),
}

_RETURNED = "Donate the given array to `jax.jit`, and XLA changes it in place; otherwise it is copied first."

JAX: dict[str, Text] = {
    **_OBJECTIVES,
    "cache_append": Text(
        "Return a paged cache with more tokens: quantise, apply RoPE if asked to, scatter by slot.",
        _RETURNED,
        examples="""\
>>> import functools, jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> @functools.partial(jax.jit, donate_argnums=0)
... def step(cache, q, latent, rope, slots, indices):
...     cache = mla.cache_append(latent, rope, cache, slots)
...     return cache, mla.sparse_mla_decode(q, cache, indices)[0]
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
        notes=_HEAD_SUMS,
    ),
    "indexer_logits": Text(parameters={"clean": "If False, give `logits`: the rest of it stays."}),
    "indexer_sparse_loss": Text(notes=_CONSTANT.format("indexer_sparse_objective")),
    "indexer_warmup_loss": Text(notes=_CONSTANT.format("indexer_warmup_objective")),
    "mla_decode": Text(
        parameters={"tree_mask": "It has 64 bits, which JAX has with `jax_enable_x64` only."},
        notes=_DECODE,
        examples="""\
>>> import jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> q, cache = jnp.ones((1, 1, 16, 576), jnp.bfloat16), jnp.ones((4, 64, 576), jnp.bfloat16)
>>> table, seqlens = jnp.array([[2, 0]], jnp.int32), jnp.array([100], jnp.int32)
>>> out, lse = jax.jit(mla.mla_decode)(q, cache, table, seqlens)
>>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
((1, 1, 16, 512), 1.0, 28.605)""",
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
    "sparse_mla_decode": Text(notes=_DECODE),
    "sparse_mla_forward": Text(
        notes="`out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`, unless arrays for them "
        "are given; `max_logits` has no gradient.",
        examples="""\
>>> import jax, jax.numpy as jnp
>>> import mla_cupy.jax as mla
>>> q, kv = jnp.ones((2, 16, 576), jnp.bfloat16), jnp.ones((100, 576), jnp.bfloat16)
>>> indices = jnp.array([[3, 70, -1], [5, -1, -1]], jnp.int32)
>>> loss = lambda kv: mla.sparse_mla_forward(q, kv, indices)[0].astype(jnp.float32).sum()
>>> gradient = jax.jit(jax.grad(loss))(kv)
>>> float(gradient[3, 0]), float(gradient[5, 0]), float(gradient[4, 0])
(8.0, 16.0, 0.0)""",
    ),
}
