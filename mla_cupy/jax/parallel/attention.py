"""Dense attention to gathered latents, forward and backward: keys and values exist for a chunk of them at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mla_cupy.jax as mla
from mla_cupy.jax.parallel.exchanges import Gradients, gathered, packed, put, rows_of, scattered
from mla_cupy.parallel.zigzag import Chunk, Segments, Zigzag, schedule

Expand = Callable[..., tuple[jax.Array, jax.Array]]


class Static(NamedTuple):
    """Static, hashable arguments."""

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
        """Calls of each piece with itself, for all ranks."""
        zigzag = self.zigzag
        return [schedule(zigzag, rank, self.chunk_tokens).own for rank in range(zigzag.world)]

    def chunks(self) -> list[tuple[Chunk, list[tuple[Segments, ...]]]]:
        """Chunks, with the calls of all ranks."""
        zigzag = self.zigzag
        every = [schedule(zigzag, rank, self.chunk_tokens).chunks for rank in range(zigzag.world)]
        return [(of[0], list(zip(*(chunk.calls for chunk in of), strict=True))) for of in zip(*every, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    static: Static, q: jax.Array, q_rope: jax.Array | None, rows: jax.Array, parameters: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Output in the dtype of q, and log-sum-exps."""
    keys = static.keys(rows, parameters)
    out, lse = mla.mla_prefill(q, **keys, q_rope=q_rope, packed=packed(static.own(), static.axis), out_dtype="float32")
    every = gathered(rows, static.axis)
    for chunk, calls in static.chunks():
        keys = static.keys(every[chunk.order], parameters)
        for call in calls:
            at = rows_of(call)
            of: dict[str, Any] = {"packed": packed(call, static.axis), "causal": False, "out_dtype": "float32"}
            of |= {"q_rope": None if q_rope is None else q_rope[at], "state_out": out[at], "state_lse": lse[at]}
            made = mla.mla_prefill(q[at], **keys, **of)
            out, lse = (put(x, at, part) for x, part in zip((out, lse), made, strict=True))
    return out.astype(q.dtype), lse


def _forward(static: Static, *given: Any) -> tuple[Any, Any]:
    out, lse = attention(static, *given)
    return (out, lse), (*given, out, lse)


def _backward(static: Static, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> Gradients:
    q, q_rope, rows, parameters, out, lse = saved
    sums: Gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (q, q_rope, parameters))
    queries = {"q": q, "q_rope": q_rope, "out": out, "dout": gradients[0].astype(q.dtype), "lse": lse}
    queries["dlse"] = gradients[1]
    sums, of_rows = _pull(static, [static.own()], rows, queries, parameters, sums, causal=True)
    every = gathered(rows, static.axis)
    sent = jnp.zeros_like(every)
    for chunk, calls in static.chunks():
        sums, gradient = _pull(static, calls, every[chunk.order], queries, parameters, sums, causal=False)
        sent = sent.at[chunk.order].set(gradient.astype(sent.dtype))
    of_rows += scattered(sent, static.axis, static.zigzag.world)
    found = (*sums[:2], of_rows, sums[2])
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, saved[:4])  # type: ignore[no-any-return]


def _pull(
    static: Static,
    calls: Sequence[Sequence[Segments]],
    rows: jax.Array,
    queries: dict[str, Any],
    parameters: tuple[jax.Array, ...],
    sums: Gradients,
    causal: bool,
) -> tuple[Gradients, jax.Array]:
    """Add the calls' gradients of queries and parameters to the sums; return them and the rows' gradients, float32."""
    dq, dq_rope, of_parameters = sums
    (k, v), pull = jax.vjp(static.expand, rows[:, : static.width], *parameters)
    keys = {"k": k, "v": v, "k_rope": static.rope(rows), "scale": static.scale, "deterministic": static.deterministic}
    found = []
    for call in calls:
        at = rows_of(call)
        of: dict[str, Any] = {name: None if x is None else x[at] for name, x in queries.items()}
        made: Any = mla.mla_prefill_backward(**of, **keys, packed=packed(call, static.axis), causal=causal)
        dq = put(dq, at, dq[at] + made[0].astype(jnp.float32))
        dq_rope = None if dq_rope is None else put(dq_rope, at, dq_rope[at] + made[3].astype(jnp.float32))
        found.append((made[1], made[2], made[4]))
    dk, dv, dk_rope = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *found)
    of_latents, *added = (x.astype(jnp.float32) for x in pull((dk, dv)))
    gradient = of_latents if dk_rope is None else jnp.concatenate([of_latents, dk_rope.astype(jnp.float32)], -1)
    added_up = tuple(total + x for total, x in zip(of_parameters, added, strict=True))
    return (dq, dq_rope, added_up), gradient


attention.defvjp(_forward, _backward)
