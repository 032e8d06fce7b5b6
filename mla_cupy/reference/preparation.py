"""Queries and keys before decode: RoPE, queries in e4m3, tokens in the paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.cache import cache_append, from_e4m3, rotate, to_e4m3
from mla_cupy.reference.fp8_queries import quantise_queries
from mla_cupy.reference.projection import absorb
from mla_cupy.shapes import D_ROPE

Array = npt.NDArray[Any]


@np.errstate(all="ignore")
def mla_prepare(
    q: npt.ArrayLike,
    latent: npt.ArrayLike | None = None,
    rope: npt.ArrayLike | None = None,
    cache: Array | None = None,
    slots: npt.ArrayLike | None = None,
    *,
    q_rope: npt.ArrayLike | None = None,
    w_uk: npt.ArrayLike | None = None,
    cos: npt.ArrayLike | None = None,
    sin: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1.0,
) -> tuple[Array, Array | None, Array | None]:
    """Turn the last 64 columns of queries, round queries to e4m3, and write tokens to a cache, in place.

    Parameters
    ----------
    q : array, (n, h, d)
        Of a 16-bit float type.
    latent, rope, cache, slots, kv_format, scales, kv_scale
        As for `cache_append`. Without a cache there may be `rope` alone.
    q_rope : array, (n, h, 64), optional
        Columns after q's.
    w_uk : array, (h, d_nope, 512), optional
        What the queries without their RoPE part are multiplied by, as by `absorb`. Queries as wide as w_uk's rows,
        without `q_rope`, have no RoPE part.
    cos, sin : array, (max_position, 32), float32, optional
        Rows are clamped positions: see `rotate`.
    positions : array, (n,), integers, optional
        Of the tokens; without them nothing turns.
    theta : float, optional
        In place of tables: pair i turns by position * theta**(-i / 32).
    interleaved : bool
        See `rotate`.
    quantise : bool
        Return e4m3 numbers of what the 16-bit result would be.
    q_scale : float, optional
        The scale of all of them. Default: each row's own, see `quantise_queries`.
    return_rope : bool
        Return the RoPE part of the tokens, turned.

    Returns
    -------
    out : array, (n, h, d) or, with q_rope, (n, h, d + 64), or with w_uk (n, h, 576 or 512), float64
    q_scales : array, (n, h), float64, or None
        What the e4m3 numbers are to be multiplied by.
    rope_out : array, (n, 64), float64, or None
    """
    whole = np.asarray(q) if q_rope is None else np.concatenate([np.asarray(q), np.asarray(q_rope)], axis=2)
    n, h, _ = whole.shape
    dtype = dtype_name(whole.dtype)
    rotation: dict[str, Any] = {}
    if positions is not None:
        rotation = {"cos": cos, "sin": sin, "positions": positions}
        if theta is not None:
            angles = np.asarray(positions).astype(np.float64)[:, None] * theta ** (-np.arange(D_ROPE // 2) / 32.0)
            rotation = {"cos": np.cos(angles), "sin": np.sin(angles), "positions": np.arange(n)}
    out = whole.astype(np.float64)
    if rotation and n:
        of_rows = {**rotation, "positions": np.repeat(np.asarray(rotation["positions"]), h)}
        turned = rotate(whole[..., -D_ROPE:].reshape(n * h, D_ROPE), **of_rows, interleaved=interleaved)
        out[..., -D_ROPE:] = round_to(turned, dtype).reshape(n, h, D_ROPE)
    if w_uk is not None:
        d_nope = np.asarray(w_uk).shape[1]
        (absorbed,) = absorb(whole[..., :d_nope], w_uk)
        out = np.concatenate([absorbed, out[..., d_nope:]], axis=2)
    if cache is not None and latent is not None and slots is not None:
        of_tokens: dict[str, Any] = {"kv_format": kv_format, "scales": scales, "kv_scale": kv_scale}
        of_tokens |= {} if rope is None else {**rotation, "interleaved": interleaved}
        cache_append(latent, rope, cache, slots, **of_tokens)
    q_scales = rope_out = None
    if return_rope:
        kept = np.asarray(rope)
        rope_out = round_to(rotate(kept, **rotation, interleaved=interleaved), dtype) if rotation and n else kept
        rope_out = rope_out.astype(np.float64)
    if quantise:
        rows = out.astype(whole.dtype)
        if q_scale is None:
            codes, q_scales = quantise_queries(rows)
        else:
            codes = to_e4m3(rows.astype(np.float32) / np.float32(q_scale))
            q_scales = np.full((n, h), float(np.float32(q_scale)))
        out = from_e4m3(codes).astype(np.float64)
    return out, q_scales, rope_out
