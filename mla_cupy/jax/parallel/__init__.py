"""Context-parallel prefill and training inside `jax.shard_map`, over the devices of an axis of the mesh.

Each device holds two pieces of every sequence, see `mla_cupy.parallel.Zigzag`. Devices gather latents, 1,152 bytes per
token, and expand keys and values themselves. The functions mirror `mla_cupy.torch.parallel`, with the name of the
axis in place of a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mla_cupy.jax as mla
from mla_cupy.jax.parallel.attention import Expand, Static, attention
from mla_cupy.jax.parallel.exchanges import bounds, check, gather_rows, packed, put, rows_of
from mla_cupy.jax.varying import spread
from mla_cupy.ops.checks import check_count, check_flag
from mla_cupy.ops.indexer.loss_inputs import weight_factor
from mla_cupy.parallel.zigzag import CHUNK_TOKENS, Zigzag, whole
from mla_cupy.shapes import MAX_TOKENS

__all__ = ["SparsePrefill", "gather", "prefill", "sparse_prefill", "warmup_objective"]

_LOGITS_BYTES = 64 << 20
"""Most bytes of logits in memory while keys are selected."""


class SparsePrefill(NamedTuple):
    """Result of `sparse_prefill`.

    Attributes
    ----------
    out : array, (s, h, 512)
        Attention of this device's queries.
    lse : array, (s, h), float32
        Log-sum-exps of the attention.
    indices : array, (s, topk), int32
        The rows of `latents` that each query selects, -1 where there are no more.
    latents : array, (tokens, 576)
        Latents of all devices, in the sequences' order.
    index_k : array, (tokens, d_i)
        Index keys of all devices, in the same order.
    k_scale : array, (tokens,), float32, or None
        Scales of the index keys, if these are codes.
    """

    out: jax.Array
    lse: jax.Array
    indices: jax.Array
    latents: jax.Array
    index_k: jax.Array
    k_scale: jax.Array | None


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
        latents, row by row. It runs again in the backward, and must not use other traced arrays. JAX compiles anew
        for each function, so define it once.
    zigzag : Zigzag
        Lengths of the whole sequences, multiples of 2 * world.
    axis : str
        Axis of the mesh, of `zigzag.world` devices.
    q_rope : array, (s, h, 64), dtype of q, optional
        Last columns of the queries, turned by `zigzag.positions(rank)`.
    k_rope : array, (s, 64), dtype of q, optional
        Last columns of the keys, turned likewise; the same for all heads.
    parameters : sequence of array
        Arrays that `expand` reads.
    scale : float, optional
        Factor of the scores, as for `mla_prefill`.
    chunk_tokens : int
        Approximate number of tokens with keys and values in memory at a time.
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
    Gradients of latents travel in the dtype of the latents, so each device's part is rounded once; the owner adds the
    parts in float32, in the order of the devices. `shard_map` adds up the gradients of parameters that are the same on
    all devices.
    """
    check(zigzag, axis, {"q": q, "latents": latents, "q_rope": q_rope, "k_rope": k_rope})
    tokens = check_count("chunk_tokens", chunk_tokens, 1, MAX_TOKENS)
    static = Static(zigzag, axis, expand, latents.shape[-1], scale, tokens, check_flag("deterministic", deterministic))
    rows = latents if k_rope is None else jnp.concatenate([latents, k_rope], -1)
    q, q_rope, rows, *weights = spread((q, q_rope, rows, *parameters))
    found: tuple[jax.Array, jax.Array] = attention(static, q, q_rope, rows, tuple(weights))
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
    check(zigzag, axis, {"x": x})
    found: jax.Array = gather_rows(zigzag, axis, x)
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
    k_scale: jax.Array | None = None,
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
    index_q : array, (s, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer; uint8 holds e4m3 codes.
    index_k : array, (s, d_i), dtype of index_q
        Keys of the indexer.
    weights : array, (s, h_i), float32
        Weights of the indexer's heads, without the factor (h_i * d_i)**-0.5; for codes, with all factors.
    zigzag : Zigzag
        Lengths of the whole sequences, multiples of 2 * world.
    axis : str
        Axis of the mesh, of `zigzag.world` devices.
    scale : float
        Factor of the attention's scores.
    k_scale : array, (s,), float32, optional
        Scales of index keys that are codes.
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
    check(zigzag, axis, {"q": q, "latents": latents, "index_q": index_q, "index_k": index_k, "weights": weights})
    every, rows = gather(index_k, zigzag, axis), gather(latents, zigzag, axis)
    scales = None if k_scale is None else gather(k_scale, zigzag, axis)
    folded = weights * weight_factor(index_q.dtype.name, *index_q.shape[-2:])
    scored = jax.lax.stop_gradient((index_q, every, folded))
    indices = _selected(scored, bounds(zigzag, axis), scales, max(1, min(topk, zigzag.tokens)))
    of: dict[str, Any] = {"scale": scale, "attn_sink": attn_sink, "deterministic": deterministic}
    out, lse, _ = mla.sparse_mla_forward(q, rows, indices, **of)
    return SparsePrefill(out, lse, indices, rows, every, scales)


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
        Arguments for this device's tokens, as for `indexer_warmup_objective`.
    k, k_rope, index_k : array
        Keys of all tokens, as `gather` returns them.
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
    check(zigzag, axis, {"q": q, "index_q": index_q, "weights": weights})
    objective, kl = jnp.zeros(()), jnp.zeros(len(q))
    for calls in zip(*(whole(zigzag, rank).calls for rank in range(zigzag.world)), strict=True):
        at = rows_of(calls)
        named = {"q_rope": q_rope, "lse": lse, "row_weights": row_weights}
        of: dict[str, Any] = {name: None if x is None else x[at] for name, x in named.items()}
        of |= {"k_rope": k_rope, "packed": packed(calls, axis), "scale": scale}
        value, each = mla.indexer_warmup_objective(q[at], k, index_q[at], index_k, weights[at], **of)
        objective, kl = objective + value, put(kl, at, kl[at] + each)
    return objective, kl


def _selected(
    scored: tuple[jax.Array, ...], limits: tuple[jax.Array, jax.Array], k_scale: jax.Array | None, topk: int
) -> jax.Array:
    """Select the keys with the largest scores, through logits of bounded size."""
    q, k, weights = scored
    step = max(1, _LOGITS_BYTES // (4 * max(1, len(k))))
    found = []
    for begin in range(0, len(q), step):
        at = slice(begin, begin + step)
        first, last = (x[at] for x in limits)
        logits = mla.indexer_logits(q[at], k, weights[at], first, last, k_scale=k_scale, clean=False)
        found.append(mla.indexer_topk(logits, topk, ks=first, ke=last, return_values=False)[0])
    return jnp.concatenate(found)
