"""Context-parallel prefill and training inside `jax.shard_map`, over the devices of an axis of the mesh.

Each device holds two pieces of every sequence, see `mla_cupy.parallel.Zigzag`. Devices gather latents, 1,152 bytes per
token, and expand keys and values themselves. The functions are those of `mla_cupy.torch.parallel`, with the name of the
axis in place of a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mla_cupy.jax as mla
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.jax.varying import spread
from mla_cupy.ops.checks import check_count, check_flag
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel.zigzag import CHUNK_TOKENS, Chunk, Segments, Zigzag, check_tokens, schedule, whole
from mla_cupy.shapes import MAX_TOKENS

__all__ = ["SparsePrefill", "gather", "prefill", "sparse_prefill", "warmup_objective"]

Expand = Callable[..., tuple[jax.Array, jax.Array]]
Gradients = tuple[Any, ...]
_LOGITS_BYTES = 64 << 20
"""Bytes of the logits from which keys are selected at a time."""


class SparsePrefill(NamedTuple):
    """Result of `sparse_prefill`.

    Attributes
    ----------
    out : array, (s, h, 512)
        Attention of this device's queries.
    lse : array, (s, h), float32
        Its log-sum-exps.
    indices : array, (s, topk), int32
        The rows of `latents` that each query selects, -1 where there are no more.
    latents : array, (tokens, 576)
        Latents of all devices, in the sequences' order.
    index_k : array, (tokens, d_i)
        Index keys of all devices, in the same order.
    """

    out: jax.Array
    lse: jax.Array
    indices: jax.Array
    latents: jax.Array
    index_k: jax.Array


def prefill(
    q: jax.Array,
    latents: jax.Array,
    expand: Expand,
    zigzag: Zigzag,
    axis: str,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    parameters: Sequence[jax.Array] = (),
    scale: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of this device's queries to the keys of all devices; differentiable in reverse mode.

    Parameters
    ----------
    q : array, (s, h, d_qk), bfloat16 or float16
        Queries of this device's tokens, `zigzag.rows(rank)`. With `q_rope`, all columns but the last 64.
    latents : array, (s, d_c), dtype of q
        Normalised latents of the same tokens.
    expand : callable
        `expand(latents, *parameters)` returns the keys, (n, h_kv, d_k), and the values, (n, h_kv, d_v), of any n
        latents, row by row. It runs again in the backward, and may not use other arrays that are traced. JAX compiles
        anew for another function, so define it once.
    zigzag : Zigzag
        Lengths of the whole sequences, multiples of 2 * world.
    axis : str
        Axis of the mesh, of `zigzag.world` devices.
    q_rope : array, (s, h, 64), dtype of q, optional
        Last columns of the queries, turned by `zigzag.positions(rank)`.
    k_rope : array, (s, 64), dtype of q, optional
        Last columns of the keys, turned likewise; the same for all heads.
    parameters : sequence of array
        What `expand` reads.
    scale : float, optional
        Factor of the scores, as for `mla_prefill`.
    chunk_tokens : int
        Tokens whose keys and values exist at a time, about.
    deterministic : bool
        Give all gradients the same bits in every run, as for `mla_prefill_backward`.

    Returns
    -------
    out : array, (s, h, d_v), dtype of q
    lse : array, (s, h), float32
        Natural log-sum-exps.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If an argument does not fit.

    Notes
    -----
    XLA overlaps the gather of a chunk with attention to the chunk before it where its scheduler sees to that, as on
    GPUs by default. Every device adds the gradients of its latents in float32, in the order of the devices. `shard_map`
    adds up the gradients of parameters that are the same on all devices.
    """
    _check(zigzag, axis, {"q": q, "latents": latents, "q_rope": q_rope, "k_rope": k_rope})
    tokens = check_count("chunk_tokens", chunk_tokens, 1, MAX_TOKENS)
    static = _Static(zigzag, axis, expand, latents.shape[-1], scale, tokens, check_flag("deterministic", deterministic))
    rows = latents if k_rope is None else jnp.concatenate([latents, k_rope], -1)
    q, q_rope, rows, *weights = spread((q, q_rope, rows, *parameters))
    found: tuple[jax.Array, jax.Array] = _prefill(static, q, q_rope, rows, tuple(weights))
    return found


def gather(x: jax.Array, zigzag: Zigzag, axis: str) -> jax.Array:
    """Rows of all devices in the sequences' order; differentiable.

    Parameters
    ----------
    x : array, (s, ...)
        Rows of this device's tokens, `zigzag.rows(rank)`.
    zigzag : Zigzag
    axis : str
        Axis of the mesh.

    Returns
    -------
    array, (tokens, ...)

    Raises
    ------
    ShapeError, ArgumentError
        As for `prefill`.

    Notes
    -----
    The gradient of a row is the sum of all devices' gradients, added in float32 in the order of the devices.
    """
    _check(zigzag, axis, {"x": x})
    found: jax.Array = _gather(zigzag, axis, x)
    return found


def sparse_prefill(
    q: jax.Array,
    latents: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    zigzag: Zigzag,
    axis: str,
    *,
    scale: float,
    topk: int = 2048,
    attn_sink: jax.Array | None = None,
    deterministic: bool = False,
) -> SparsePrefill:
    """DeepSeek sparse attention of this device's queries to the tokens of all devices that the indexer selects.

    Parameters
    ----------
    q : array, (s, h, 576), bfloat16
        Absorbed queries of this device's tokens, `zigzag.rows(rank)`.
    latents : array, (s, 576), bfloat16
        Latents and RoPE columns of the same tokens.
    index_q : array, (s, h_i, d_i), bfloat16
        Queries of the indexer.
    index_k : array, (s, d_i), bfloat16
        Its keys.
    weights : array, (s, h_i), float32
        Weights of its heads, without the factor (h_i * d_i)**-0.5.
    zigzag : Zigzag
        Lengths of the whole sequences, multiples of 2 * world.
    axis : str
        Axis of the mesh, of `zigzag.world` devices.
    scale : float
        Factor of the attention's scores.
    topk : int
        Keys that a query selects.
    attn_sink : array, (h,), float32, optional
        As for `sparse_mla_forward`.
    deterministic : bool
        Give all gradients the same bits in every run.

    Returns
    -------
    SparsePrefill

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        As for `prefill`.

    Notes
    -----
    The indexer learns from `mla_cupy.jax.indexer_sparse_objective(q, found.latents, index_q, found.index_k, weights,
    found.indices, lse=found.lse, causal=False, ...)`, the sum over this device's tokens: add it up with `jax.lax.psum`.
    """
    _check(zigzag, axis, {"q": q, "latents": latents, "index_q": index_q, "index_k": index_k, "weights": weights})
    every, rows = gather(index_k, zigzag, axis), gather(latents, zigzag, axis)
    folded = weights * (index_q.shape[-2] * index_q.shape[-1]) ** -0.5
    scored = jax.lax.stop_gradient((index_q, every, folded))
    indices = _selected(scored, _bounds(zigzag, axis), max(1, min(topk, zigzag.tokens)))
    of: dict[str, Any] = {"scale": scale, "attn_sink": attn_sink, "deterministic": deterministic}
    out, lse, _ = mla.sparse_mla_forward(q, rows, indices, **of)
    return SparsePrefill(out, lse, indices, rows, every)


def warmup_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    zigzag: Zigzag,
    axis: str,
    *,
    scale: float,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    lse: jax.Array | None = None,
    row_weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The loss that warms the indexer up, `indexer_warmup_objective`, over this device's queries and all keys.

    Parameters
    ----------
    q, q_rope, index_q, weights, lse, row_weights : array
        Of this device's tokens, as for `indexer_warmup_objective`.
    k, k_rope, index_k : array
        Of all tokens, such as `gather` returns them.
    zigzag : Zigzag
        Lengths of the whole sequences, multiples of 2 * world.
    axis : str
        Axis of the mesh, of `zigzag.world` devices.
    scale : float
        Factor of the attention's scores.

    Returns
    -------
    objective : array, ()
        Sum of row_weights * kl over this device's tokens, differentiable by index_q, index_k and weights.
    kl : array, (s,), float32

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        As for `indexer_warmup_objective`.
    """
    _check(zigzag, axis, {"q": q, "index_q": index_q, "weights": weights})
    objective, kl = jnp.zeros(()), jnp.zeros(len(q))
    for calls in zip(*(whole(zigzag, rank).calls for rank in range(zigzag.world)), strict=True):
        at = _range(calls)
        named = {"q_rope": q_rope, "lse": lse, "row_weights": row_weights}
        of: dict[str, Any] = {name: None if x is None else x[at] for name, x in named.items()}
        of |= {"k_rope": k_rope, "packed": _packed(calls, axis), "scale": scale}
        value, each = mla.indexer_warmup_objective(q[at], k, index_q[at], index_k, weights[at], **of)
        objective, kl = objective + value, kl + jnp.zeros(len(q)).at[at].set(each)
    return objective, kl


# ---- Schedules ------------------------------------------------------------------------------------------------------


def _check(zigzag: Zigzag, axis: str, arrays: dict[str, Any]) -> None:
    """Check that arrays have the rows of a device, which are as many on all."""
    if not zigzag.is_even:
        remedy = "pad the sequences, as shards of an array have one size"
        raise ArgumentError(explain("zigzag.lengths", zigzag.lengths, f"multiples of {2 * zigzag.world}", remedy))
    world = jax.lax.axis_size(axis) if hasattr(jax.lax, "axis_size") else jax.lax.psum(1, axis)
    if world != zigzag.world:
        raise ArgumentError(explain("axis", f"{axis!r} of {world} devices", f"zigzag.world={zigzag.world} devices"))
    for name, x in arrays.items():
        if x is not None:
            check_tokens(name, x.shape[0], zigzag, 0)


def _of_device(tables: Sequence[Any], axis: str) -> jax.Array:
    """This device's one of the arrays of all ranks."""
    return jnp.asarray(np.stack(tables))[jax.lax.axis_index(axis)]


def _packed(calls: Sequence[Segments], axis: str) -> Packed:
    return Packed(*(_of_device([getattr(call, name) for call in calls], axis) for name in ("starts_q", "starts_kv")))


def _range(calls: Sequence[Segments]) -> slice:
    """The queries of a call, which are the same rows on every device."""
    return slice(calls[0].begin, calls[0].end)


def _bounds(zigzag: Zigzag, axis: str) -> tuple[jax.Array, jax.Array]:
    first, last = zip(*(zigzag.bounds(rank) for rank in range(zigzag.world)), strict=True)
    return _of_device(first, axis), _of_device(last, axis)


def _selected(scored: tuple[jax.Array, ...], bounds: tuple[jax.Array, jax.Array], topk: int) -> jax.Array:
    """Rows of the keys of largest scores, through logits of bounded size."""
    q, k, weights = scored
    step = max(1, _LOGITS_BYTES // (4 * max(1, len(k))))
    found = []
    for begin in range(0, len(q), step):
        at = slice(begin, begin + step)
        first, last = (x[at] for x in bounds)
        logits = mla.indexer_logits(q[at], k, weights[at], first, last, clean=False)
        found.append(mla.indexer_topk(logits, topk, ks=first, ke=last, return_values=False)[0])
    return jnp.concatenate(found)


# ---- Exchanges ------------------------------------------------------------------------------------------------------


def _gathered(x: jax.Array, chunk: Chunk, axis: str) -> jax.Array:
    """Rows of all devices in the order of a chunk."""
    every = jax.lax.all_gather(x[chunk.sent], axis, tiled=True)
    return every[chunk.order]


def _scattered(gradient: jax.Array, chunk: Chunk, axis: str, world: int) -> jax.Array:
    """Sums of the gradients of gathered rows for the devices that own these, float32, in the order of the devices."""
    sent = jnp.zeros((world * chunk.most, *gradient.shape[1:]), gradient.dtype).at[chunk.order].set(gradient)
    received = jax.lax.all_to_all(sent.reshape(world, chunk.most, *gradient.shape[1:]), axis, 0, 0)
    return received.sum(0, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(zigzag: Zigzag, axis: str, x: jax.Array) -> jax.Array:
    return _gathered(x, whole(zigzag, 0), axis)


def _gather_forward(zigzag: Zigzag, axis: str, x: jax.Array) -> tuple[jax.Array, None]:
    return _gather(zigzag, axis, x), None


def _gather_backward(zigzag: Zigzag, axis: str, saved: None, gradient: jax.Array) -> Gradients:
    return (_scattered(gradient, whole(zigzag, 0), axis, zigzag.world).astype(gradient.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


# ---- Dense attention ------------------------------------------------------------------------------------------------


class _Static(NamedTuple):
    """Arguments that are no arrays; they can be hashed."""

    zigzag: Zigzag
    axis: str
    expand: Expand
    width: int
    scale: float | None
    chunk_tokens: int
    deterministic: bool

    def rope(self, rows: jax.Array) -> jax.Array | None:
        """RoPE columns of the keys."""
        return rows[:, self.width :] if rows.shape[1] > self.width else None

    def keys(self, rows: jax.Array, parameters: Sequence[jax.Array]) -> dict[str, Any]:
        """Keys and values."""
        k, v = self.expand(rows[:, : self.width], *parameters)
        return {"k": k, "v": v, "k_rope": self.rope(rows), "scale": self.scale}

    def own(self) -> list[Segments]:
        """Each piece with itself, for all ranks."""
        zigzag = self.zigzag
        return [schedule(zigzag, rank, self.chunk_tokens).own for rank in range(zigzag.world)]

    def chunks(self) -> list[tuple[Chunk, list[tuple[Segments, ...]]]]:
        """What is gathered, and the calls, each for all ranks."""
        zigzag = self.zigzag
        every = [schedule(zigzag, rank, self.chunk_tokens).chunks for rank in range(zigzag.world)]
        return [(of[0], list(zip(*(chunk.calls for chunk in of), strict=True))) for of in zip(*every, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefill(
    static: _Static, q: jax.Array, q_rope: jax.Array | None, rows: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    keys, packed = static.keys(rows, parameters), _packed(static.own(), static.axis)
    out, lse = mla.mla_prefill(q, **keys, q_rope=q_rope, packed=packed, out_dtype="float32")
    for chunk, calls in static.chunks():
        keys = static.keys(_gathered(rows, chunk, static.axis), parameters)
        for call in calls:
            at = _range(call)
            of: dict[str, Any] = {"packed": _packed(call, static.axis), "causal": False, "out_dtype": "float32"}
            of |= {"q_rope": None if q_rope is None else q_rope[at], "state_out": out[at], "state_lse": lse[at]}
            made = mla.mla_prefill(q[at], **keys, **of)
            out, lse = (x.at[at].set(part) for x, part in zip((out, lse), made, strict=True))
    return out.astype(q.dtype), lse


def _forward(static: _Static, *given: Any) -> tuple[Any, Any]:
    out, lse = _prefill(static, *given)
    return (out, lse), (*given, out, lse)


def _backward(static: _Static, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> Gradients:
    q, q_rope, rows, parameters, out, lse = saved
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32) + 0 * x.astype(jnp.float32), saved[:4])
    queries = {"q": q, "q_rope": q_rope, "out": out, "dout": gradients[0].astype(q.dtype), "lse": lse}
    queries["dlse"] = gradients[1]
    sums, gradient = _pull(static, [static.own()], rows, queries, parameters, sums, causal=True)
    of_rows = gradient
    for chunk, calls in static.chunks():
        gathered = _gathered(rows, chunk, static.axis)
        sums, gradient = _pull(static, calls, gathered, queries, parameters, sums, causal=False)
        own = _scattered(gradient.astype(rows.dtype), chunk, static.axis, static.zigzag.world)
        of_rows = of_rows.at[chunk.sent].add(own)
    found = (*sums[:2], of_rows, sums[3])
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, saved[:4])  # type: ignore[no-any-return]


def _pull(
    static: _Static,
    calls: Sequence[Sequence[Segments]],
    rows: jax.Array,
    queries: dict[str, Any],
    parameters: tuple[jax.Array, ...],
    sums: Gradients,
    causal: bool,
) -> tuple[Gradients, jax.Array]:
    """The sums with what the calls add for queries and parameters, and the gradients of the rows, float32."""
    dq, dq_rope, of_rows, of_parameters = sums
    (k, v), pull = jax.vjp(static.expand, rows[:, : static.width], *parameters)
    keys = {"k": k, "v": v, "k_rope": static.rope(rows), "scale": static.scale, "deterministic": static.deterministic}
    found = []
    for call in calls:
        at = _range(call)
        of: dict[str, Any] = {name: None if x is None else x[at] for name, x in queries.items()}
        made: Any = mla.mla_prefill_backward(**of, **keys, packed=_packed(call, static.axis), causal=causal)
        dq = dq.at[at].add(made[0].astype(jnp.float32))
        dq_rope = None if dq_rope is None else dq_rope.at[at].add(made[3].astype(jnp.float32))
        found.append((made[1], made[2], made[4]))
    dk, dv, dk_rope = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *found)
    of_latents, *added = (x.astype(jnp.float32) for x in pull((dk, dv)))
    gradient = of_latents if dk_rope is None else jnp.concatenate([of_latents, dk_rope.astype(jnp.float32)], -1)
    added_up = tuple(total + x for total, x in zip(of_parameters, added, strict=True))
    return (dq, dq_rope, of_rows, added_up), gradient


_prefill.defvjp(_forward, _backward)
