"""Functions of `mla_cupy.ops.preparation` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.preparation import OPERATION


def mla_prepare(
    q: jax.Array,
    latent: jax.Array | None = None,
    rope: jax.Array | None = None,
    cache: jax.Array | None = None,
    slots: jax.Array | None = None,
    *,
    q_rope: jax.Array | None = None,
    w_uk: jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    record: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    out: jax.Array | None = None,
    q_scales: jax.Array | None = None,
    rope_out: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Make queries and keys ready for decode, in one launch: RoPE of both, queries in e4m3, tokens in the cache.

    Each part is optional; `cache_append` is the form for keys alone. With `w_uk` the launch is that of `absorb`, too.

    For arrays of JAX: the notes of `mla_cupy.mla_prepare` hold here, too.

    Parameters
    ----------
    q : array, (n, h, d), bfloat16 or float16
        Queries, whose last 64 columns are their RoPE part: d is 576, 512, 192 or 64. With `q_rope` those without it: d
        is 512, 448 or 128. The last axis is contiguous; other strides are free (multiples of 16 bytes are fastest).
    latent : array, (n, d_latent), dtype of q, optional
        The tokens' latent part, as for `cache_append`; with `cache` and `slots`.
    rope : array, (n, 64), dtype of q, optional
        Their RoPE part, before RoPE; with a cache, or with `return_rope`.
    cache : array, (num_pages, page_size, width), optional
        As for `cache_append`.
    slots : array, (n,), int32 or int64, optional
        As for `cache_append`: a token whose slot is outside of the cache is skipped.
    q_rope : array, (n, h, 64), dtype of q, optional
        The queries' RoPE part where it lies elsewhere, as beside absorbed queries.
    w_uk : array, (h, d_nope, 512), dtype of q, optional
        The keys' half of kv_b_proj, as for `absorb`: the queries without their RoPE part are multiplied by it. Then d
        is d_nope + 64, or with `q_rope` d_nope, of 64, 128, 192 or 256; q, w_uk, q_rope and out start at, and step by,
        multiples of 16 bytes; and queries stay in 16 bits.
    cos, sin : array, (max_position, 32), float32, optional
        As for `cache_append`, for q and `rope`. The last axis is contiguous.
    positions : array, (n,), int32 or int64, optional
        Of the tokens: rows of cos and sin, clamped to them, or any integers with `theta`. Without them nothing turns.
    theta : float, optional
        Base of RoPE, at least 1, in place of cos and sin: pair i turns by position * theta**(-i / 32).
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).
    quantise : bool
        Make `out` e4m3 codes of the 16-bit result.
    q_scale : float, optional
        Scale of all codes, as `mla_decode` takes it. Default: each row has its own.
    return_rope : bool
        Return the turned RoPE part of the tokens, too.
    record, scales, kv_scale
        As for `cache_append`.
    out : array, (n, h, d) or (n, h, d + 64), or (n, h, 576) with w_uk, dtype of q; or uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    q_scales : array, (n, h), float32, optional
        Whose memory the result takes over.
    rope_out : array, (n, 64), dtype of q, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    out : array, (n, h, d) or (n, h, d + 64), or (n, h, 576) with w_uk
        Queries for `mla_decode`: with `quantise` uint8, the bits of e4m3.
    q_scales : array, (n, h), float32, or None
        With `quantise`: what each row's codes are to be multiplied by.
    rope_out : array, (n, 64), or None
        With `return_rope`.
    cache : array, or None
        With the changes; in the old one's memory if that is donated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (q, latent, rope, cache, slots, q_rope, w_uk, cos, sin, positions, out, q_scales, rope_out)
    options = (theta, interleaved, quantise, q_scale, return_rope, record, scales, kv_scale)
    out, q_scales, rope_out, cache = run(OPERATION, arrays, options, exportable)
    return out, q_scales, rope_out, cache
