"""Functions of `mla_cupy.ops.cache` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.cache import APPEND_OPERATION, GATHER_OPERATION


def cache_append(
    latent: jax.Array,
    rope: jax.Array | None,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    record: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    interleaved: bool = True,
    exportable: bool = False,
) -> jax.Array:
    """Return a paged cache with more tokens: quantise, apply RoPE if asked to, scatter by slot.

    For arrays of JAX: the notes of `mla_cupy.cache_append` hold here, too. Donate the given array to `jax.jit`, and XLA
    changes it in place; otherwise it is copied first.

    Parameters
    ----------
    latent : array, (n, d_latent), bfloat16, float16 or float32
        d_latent is 512, or 448 for the records "v4", "v41" and "v41-fp4". The last axis is contiguous.
    rope : array, (n, 64), dtype of latent, or None
        None for records without RoPE. The last axis is contiguous.
    cache : array, (num_pages, page_size, width), uint8 or a 16-bit float type
        Pages of a record: `mla-cupy formats` lists them. An axis of size 1 may stand on either side of the tokens, as
        for `mla_decode`. Pages may be any distance apart; caches of bytes start at, and step by, multiples of 16 bytes.
    slots : array, (n,), int32 or int64
        Token i goes to page slots[i] // page_size, place slots[i] % page_size. A slot outside of the cache, -1 being
        the usual mark, is skipped. If several tokens have the same slot, which of them wins is undefined.
    cos, sin : array, (max_position, 32), float32, optional
        Apply RoPE to `rope` first: a pair (x, y) becomes (x * cos - y * sin, x * sin + y * cos). The last axis is
        contiguous.
    positions : array, (n,), int32 or int64, optional
        Rows of cos and sin; clamped to them. Given with these, or not at all.
    record : str, optional
        Name of the record. Default: the one of this dtype and width.
    scales : str, optional
        For the record "v32": "power_of_2", the default, gives the bytes of FlashMLA's quantiser; "plain" those of
        vLLM's.
    kv_scale : float
        For the record "fp8": the scale by which the stored numbers are multiplied when they are read.
    interleaved : bool
        Pairs that RoPE turns: elements (2i, 2i + 1), as in DeepSeek's models, or, if False, (i, i + 32).
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    cache : array
        With the changes; in the old one's memory if that is donated.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and the cache is untouched.

    Notes
    -----
    It has no gradient.

    Examples
    --------
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
    ((4, 64, 656), 1.0)
    """
    arrays = (latent, rope, cache, slots, cos, sin, positions)
    options = (record, scales, kv_scale, interleaved)
    (cache,) = run(APPEND_OPERATION, arrays, options, exportable)
    return cache


def cache_gather(
    cache: jax.Array,
    slots: jax.Array,
    *,
    record: str | None = None,
    kv_scale: float = 1,
    out: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> jax.Array:
    """Read tokens of a paged cache as rows of numbers, dequantised.

    For arrays of JAX: the notes of `mla_cupy.cache_gather` hold here, too.

    Parameters
    ----------
    cache, record, kv_scale
        As for `cache_append`.
    slots : array, (n,), int32 or int64
        A slot outside of the cache, such as -1, gives a row of zeros.
    out : array, (n, d_qk), optional
        Whose memory the result takes over.
    out_dtype : str or dtype, optional
        "bfloat16", "float16" or "float32". Default: the dtype of `out`, or of a 16-bit cache, or bfloat16.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    array, (n, d_qk)
        Latent, then RoPE. A quantised element is its value times its scale, rounded to float32 and then to `out_dtype`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (cache, slots, out)
    options = (record, kv_scale, out_dtype)
    (out,) = run(GATHER_OPERATION, arrays, options, exportable)
    return out
