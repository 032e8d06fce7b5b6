"""Functions of `mla_cupy.ops.indexer.prepare_both` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.prepare_both import OPERATION


def indexer_prepare(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    cache: jax.Array | None = None,
    slots: jax.Array | None = None,
    *,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    eps: float = 1e-06,
    return_k: bool = False,
    codes: jax.Array | None = None,
    folded: jax.Array | None = None,
    k_codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Rotate and quantise the index queries and keys of the same tokens in one launch.

    It is `indexer_prepare_q`, and `indexer_cache_append` or `indexer_prepare_k`: the keys go to a cache, or are
    returned.

    For arrays of JAX: the notes of `mla_cupy.indexer_prepare` hold here, too.

    Parameters
    ----------
    q : array, (n, h, d), bfloat16
        As for `indexer_prepare_q`.
    weights : array, (n, h), float32
    k : array, (n, d), bfloat16
        As for `indexer_prepare_k`. The last axis is contiguous.
    cos, sin : array, (max_position, rope_pairs), float32
        As for `indexer_prepare_q`, for both.
    positions : array, (n,), int32
        Rows of cos and sin; clamped to them.
    cache : array, (num_pages, page_size, d + 4), uint8, optional
        As for `indexer_cache_append`; with `slots`.
    slots : array, (n,), int32 or int64, optional
        As for `indexer_cache_append`.
    norm_weight, norm_bias : array, (d,), float32, optional
        Of the keys' LayerNorm: see `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, accumulate
        As for `indexer_prepare_q`.
    eps : float
        Of the LayerNorm.
    return_k : bool
        Return the keys; in place of a cache.
    codes : array, (n, h, d), uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    folded : array, (n, h), float32, optional
        Whose memory the result takes over.
    k_codes : array, (n, d), uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    k_scale : array, (n,), float32, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    codes : array, (n, h, d), uint8
        Bits of e4m3.
    folded : array, (n, h), float32
    k_codes : array, (n, d), uint8, or None
        With `return_k`.
    k_scale : array, (n,), float32, or None
        With `return_k`.
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
    arrays = (q, weights, k, cos, sin, positions, cache, slots, norm_weight, norm_bias, codes, folded, k_codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate, eps, return_k)
    codes, folded, k_codes, k_scale, cache = run(OPERATION, arrays, options, exportable)
    return codes, folded, k_codes, k_scale, cache
