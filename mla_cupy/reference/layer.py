"""The textbook MLA layer of DeepSeek-V2 and V3, and its attention in four forms that compute the same thing.

A token's hidden state is projected down to a latent c of 512 numbers and a rotated key r of 64 that all heads share;
these 576 numbers are all that is cached. With per-head matrices U_k (keys) and U_v (values), head h has

    score(i, j) = scale * (q_nope[i] . U_k c[j]  +  q_rope[i] . r[j])          un-absorbed: 192-wide queries and keys
                = scale * (U_k^T q_nope[i] . c[j]  +  q_rope[i] . r[j])        absorbed: 576-wide queries and keys
    out(i)      = sum_j p(i, j) U_v c[j]  =  U_v sum_j p(i, j) c[j]

The un-absorbed form materialises keys and values per head (traditional MLA); the absorbed one attends to the unchanged
cache (multi-query attention, like the kernels). Each exists in a naive version, with the whole matrix of scores, and
chunked over the cached tokens with an online softmax, without that matrix.

Left out, because they change nothing in the attention: YaRN's scaling of positions, biases, dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MlaConfig", "MlaWeights", "mla_layer", "random_weights"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MlaConfig:
    """Dimensions of a layer; the defaults are DeepSeek-V3's."""

    hidden: int = 7168
    q_lora: int = 1536
    kv_lora: int = 512
    heads: int = 128
    d_nope: int = 128
    d_rope: int = 64
    d_v: int = 128
    rope_base: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def scale(self) -> float:
        """Factor of the scores. It belongs to the un-absorbed width, also in the absorbed form."""
        return 1 / math.sqrt(self.d_nope + self.d_rope)


@dataclass(frozen=True)
class MlaWeights:
    """The weights of a layer. A projection maps its first axis (after `heads`) to its last."""

    config: MlaConfig
    q_down: Array = field(repr=False)  # (hidden, q_lora)
    q_norm: Array = field(repr=False)  # (q_lora,)
    q_up: Array = field(repr=False)  # (q_lora, heads * (d_nope + d_rope))
    kv_down: Array = field(repr=False)  # (hidden, kv_lora + d_rope)
    kv_norm: Array = field(repr=False)  # (kv_lora,)
    k_up: Array = field(repr=False)  # (heads, kv_lora, d_nope)
    v_up: Array = field(repr=False)  # (heads, kv_lora, d_v)
    output: Array = field(repr=False)  # (heads * d_v, hidden)


def random_weights(
    config: MlaConfig, rng: np.random.Generator, dtype: type[np.float32] | type[np.float64] = np.float64
) -> MlaWeights:
    """Gaussian weights that keep the variance of their inputs (the norms' gains are near 1)."""

    def matrix(*shape: int) -> Array:
        values: Array = rng.standard_normal(shape, dtype=dtype)
        values *= shape[-2] ** -0.5
        return values

    def gain(width: int) -> Array:
        return np.asarray(1 + 0.1 * rng.standard_normal(width), dtype)

    c = config
    return MlaWeights(
        config=c,
        q_down=matrix(c.hidden, c.q_lora),
        q_norm=gain(c.q_lora),
        q_up=matrix(c.q_lora, c.heads * (c.d_nope + c.d_rope)),
        kv_down=matrix(c.hidden, c.kv_lora + c.d_rope),
        kv_norm=gain(c.kv_lora),
        k_up=matrix(c.heads, c.kv_lora, c.d_nope),
        v_up=matrix(c.heads, c.kv_lora, c.d_v),
        output=matrix(c.heads * c.d_v, c.hidden),
    )


# ---- projections ------------------------------------------------------------------------------------------------


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """`x` divided by its root mean square over the last axis, times `gain`."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + eps) * gain
    return normed


def rope(x: Array, positions: Array, base: float) -> Array:
    """Rotate each pair (x[2i], x[2i+1]) of the last axis by positions * base**(-2i/d): interleaved RoPE.

    `x` is (s, d) or (s, heads, d), `positions` (s,).
    """
    d = x.shape[-1]
    angles = np.asarray(positions)[:, None] * base ** (-np.arange(0, d, 2) / d)
    angles = angles.reshape(len(angles), *[1] * (x.ndim - 2), d // 2)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def project_queries(weights: MlaWeights, hidden: Array, positions: Array) -> Array:
    """Hidden states (s, hidden) to un-absorbed queries (s, heads, d_nope + d_rope)."""
    c = weights.config
    latent = rms_norm(hidden @ weights.q_down, weights.q_norm, c.norm_eps)
    q = (latent @ weights.q_up).reshape(len(hidden), c.heads, c.d_nope + c.d_rope)
    q_nope, q_rope = q[..., : c.d_nope], q[..., c.d_nope :]
    return np.concatenate([q_nope, rope(q_rope, positions, c.rope_base)], axis=-1)


def project_latents(weights: MlaWeights, hidden: Array, positions: Array) -> Array:
    """Project hidden states (s, hidden) to cache rows, (s, kv_lora + d_rope)."""
    c = weights.config
    down = hidden @ weights.kv_down
    latent = rms_norm(down[:, : c.kv_lora], weights.kv_norm, c.norm_eps)
    return np.concatenate([latent, rope(down[:, c.kv_lora :], positions, c.rope_base)], axis=-1)


def absorb_queries(weights: MlaWeights, q: Array) -> Array:
    """Un-absorbed queries (s, heads, d_nope + d_rope) to absorbed ones, (s, heads, kv_lora + d_rope)."""
    d_nope = weights.config.d_nope
    q_nope, q_rope = q[..., :d_nope], q[..., d_nope:]
    q_latent = _heads_first(q_nope) @ weights.k_up.transpose(0, 2, 1)
    return np.concatenate([_heads_first(q_latent), q_rope], axis=-1)


def expand_values(weights: MlaWeights, out_latent: Array) -> Array:
    """Attention over latents (s, heads, kv_lora) to attention over values, (s, heads, d_v)."""
    return _heads_first(_heads_first(out_latent) @ weights.v_up)


def expand_keys_values(weights: MlaWeights, latents: Array) -> tuple[Array, Array]:
    """Cached latents (s, kv_lora + d_rope) to keys (s, heads, d_nope + d_rope) and values (s, heads, d_v) per head."""
    c = weights.config
    latent, k_rope = latents[:, : c.kv_lora], latents[:, c.kv_lora :]
    k_nope = _heads_first(latent @ weights.k_up)
    k_rope_of_each_head = np.broadcast_to(k_rope[:, None, :], (len(latents), c.heads, c.d_rope))
    return np.concatenate([k_nope, k_rope_of_each_head], axis=-1), _heads_first(latent @ weights.v_up)


def project_output(weights: MlaWeights, out: Array) -> Array:
    """Attention over values (s, heads, d_v) to the layer's result, (s, hidden)."""
    projected: Array = out.reshape(len(out), -1) @ weights.output
    return projected


# ---- attention in four forms: un-absorbed queries and cached latents in, (s_q, heads, d_v) out --------------------


def unabsorbed_naive(weights: MlaWeights, q: Array, latents: Array) -> Array:
    """Multi-head attention with materialised keys and values."""
    keys, values = expand_keys_values(weights, latents)
    return _attend_naive(q, keys, values, weights.config.scale)


def unabsorbed_chunked(weights: MlaWeights, q: Array, latents: Array, chunk: int = 64) -> Array:
    """Traditional MLA: the same, with the keys and values of one chunk of tokens at a time."""
    chunks = (expand_keys_values(weights, latents[s : s + chunk]) for s in range(0, len(latents), chunk))
    return _attend_chunked(q, chunks, len(latents), weights.config.scale)


def absorbed_naive(weights: MlaWeights, q: Array, latents: Array) -> Array:
    """Multi-query attention to the cached latents themselves."""
    shared = latents[:, None, :]
    out = _attend_naive(absorb_queries(weights, q), shared, shared[..., : weights.config.kv_lora], weights.config.scale)
    return expand_values(weights, out)


def absorbed_chunked(weights: MlaWeights, q: Array, latents: Array, chunk: int = 64) -> Array:
    """Absorbed attention, one chunk of tokens at a time, like the kernels."""
    shared = latents[:, None, :]
    pieces = (shared[s : s + chunk] for s in range(0, len(latents), chunk))
    chunks = ((piece, piece[..., : weights.config.kv_lora]) for piece in pieces)
    return expand_values(
        weights, _attend_chunked(absorb_queries(weights, q), chunks, len(latents), weights.config.scale)
    )


FORMS: dict[str, Callable[[MlaWeights, Array, Array], Array]] = {
    form.__name__: form for form in (unabsorbed_naive, unabsorbed_chunked, absorbed_naive, absorbed_chunked)
}


def mla_layer(weights: MlaWeights, hidden: Array, form: str = "unabsorbed_chunked") -> Array:
    """The whole layer over a prompt: hidden states (s, hidden) to (s, hidden), causal, with one of `FORMS`."""
    positions = np.arange(len(hidden))
    q = project_queries(weights, hidden, positions)
    latents = project_latents(weights, hidden, positions)
    return project_output(weights, FORMS[form](weights, q, latents))


def _attend_naive(q: Array, keys: Array, values: Array, scale: float) -> Array:
    """Causal softmax attention of (s_q, heads, d) to (s_kv, heads or 1, d), the last queries at the last keys."""
    scores = scale * (_heads_first(q) @ _heads_first(keys).transpose(0, 2, 1))
    scores = np.where(_hidden_from(len(q), len(keys), 0, len(keys)), -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return _heads_first(weights @ _heads_first(values) / weights.sum(axis=-1, keepdims=True))


def _attend_chunked(q: Array, chunks: Iterable[tuple[Array, Array]], s_kv: int, scale: float) -> Array:
    """Attention to keys and values that arrive in chunks: keep a running maximum, sum and output per row."""
    q = _heads_first(q)
    heads, s_q, _ = q.shape
    top = np.full((heads, s_q, 1), -np.inf, q.dtype)
    total = np.zeros((heads, s_q, 1), q.dtype)
    out: Array | float = 0.0
    start = 0
    for keys, values in chunks:
        scores = scale * (q @ _heads_first(keys).transpose(0, 2, 1))
        scores = np.where(_hidden_from(s_q, s_kv, start, len(keys)), -np.inf, scores)
        new_top = np.maximum(top, scores.max(axis=-1, keepdims=True))
        weights = np.exp(scores - new_top)  # finite: every query sees token 0, so the first chunk sets its maximum
        decay = np.exp(top - new_top)
        total = decay * total + weights.sum(axis=-1, keepdims=True)
        out = decay * out + weights @ _heads_first(values)
        top = new_top
        start += len(keys)
    return _heads_first(out / total)


def _hidden_from(s_q: int, s_kv: int, start: int, count: int) -> Array:
    """Mask of the keys start .. start + count that each query may not see, (s_q, count)."""
    last_visible = np.arange(s_q) + s_kv - s_q
    hidden: Array = np.arange(start, start + count) > last_visible[:, None]
    return hidden


def _heads_first(x: Array) -> Array:
    """(tokens, heads, d) to (heads, tokens, d), and back."""
    return np.swapaxes(x, 0, 1)
