"""Paged caches of records: written, read, copied, and attended to.

What `mla_cupy` changes in place, these functions return. Donate the old array to `jax.jit`, and XLA changes it in
place, too; otherwise it is copied first.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.lowering import run


def sparse_mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sparse decode straight from the FP8 records of a paged cache: see `mla_cupy.sparse_mla_decode`.

    Parameters
    ----------
    q, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length : array
    out, lse : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        scale, lse_base, empty_lse, out_dtype, kernel.

    Returns
    -------
    out, lse : array

    Notes
    -----
    It has no gradient: decode serves inference.
    """
    out, lse = run("sparse_mla_decode", locals())
    return out, lse


def cache_append(
    latent: jax.Array,
    rope: jax.Array | None,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """A paged cache with more tokens: see `mla_cupy.cache_append`.

    Parameters
    ----------
    latent, rope, cache, slots, cos, sin, positions : array
    exportable : bool
        For `jax.export`.
    **options
        record, scales, kv_scale, interleaved.

    Returns
    -------
    array
        The cache; in the old one's memory if that is donated.

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
    (cache,) = run("cache_append", locals())
    return cache


def cache_gather(
    cache: jax.Array, slots: jax.Array, *, out: jax.Array | None = None, exportable: bool = False, **options: Any
) -> jax.Array:
    """Read tokens of a paged cache: see `mla_cupy.cache_gather`.

    Parameters
    ----------
    cache, slots : array
    out : array, optional
        Whose memory the rows take over.
    exportable : bool
        For `jax.export`.
    **options
        record, kv_scale, out_dtype.

    Returns
    -------
    array, (n, d_qk)
    """
    (rows,) = run("cache_gather", locals())
    return rows


def cache_copy_pages(pool: jax.Array, pairs: jax.Array, *, exportable: bool = False) -> jax.Array:
    """A pool with pages copied in all of its layers: see `mla_cupy.cache_copy_pages`.

    Parameters
    ----------
    pool, pairs : array
    exportable : bool
        For `jax.export`.

    Returns
    -------
    array
        The pool; in the old one's memory if that is donated.
    """
    (pool,) = run("cache_copy_pages", locals())
    return pool


def cache_slots(
    block_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    slots: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Find the slots of consecutive tokens of each sequence: see `mla_cupy.cache_slots`.

    Parameters
    ----------
    block_table, starts, lengths : array
    slots, cu_seqlens : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        page_size, max_tokens, num_pages.

    Returns
    -------
    slots, cu_seqlens : array
    """
    slots, cu_seqlens = run("cache_slots", locals())
    return slots, cu_seqlens


def indexer_cache_append(
    k: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """A paged cache with more index keys: see `mla_cupy.indexer_cache_append`.

    Parameters
    ----------
    k, cache, slots, cos, sin, positions : array
    exportable : bool
        For `jax.export`.
    **options
        interleaved, hadamard, scales, reference_rounding.

    Returns
    -------
    array
        The cache; in the old one's memory if that is donated.
    """
    (cache,) = run("indexer_cache_append", locals())
    return cache


def indexer_cache_gather(
    cache: jax.Array,
    slots: jax.Array,
    *,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Read index keys of a paged cache, as they are: see `mla_cupy.indexer_cache_gather`.

    Parameters
    ----------
    cache, slots : array
    codes, k_scale : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.

    Returns
    -------
    codes, k_scale : array
    """
    codes, k_scale = run("indexer_cache_gather", locals())
    return codes, k_scale
