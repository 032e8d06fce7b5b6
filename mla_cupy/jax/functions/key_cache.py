"""Functions of `mla_cupy.ops.indexer.key_cache` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.key_cache import APPEND_OPERATION, GATHER_OPERATION


def indexer_cache_append(
    k: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    eps: float = 1e-06,
    exportable: bool = False,
) -> jax.Array:
    """Return a paged cache with more index keys.

    For arrays of JAX: the notes of `mla_cupy.indexer_cache_append` hold here, too. Donate the given array to `jax.jit`,
    and XLA changes it in place; otherwise it is copied first.

    Parameters
    ----------
    k : array, (n, d), bfloat16
        Keys, d 32, 64 or 128: after their LayerNorm, unless this is given. The last axis is contiguous.
    cache : array, (num_pages, page_size, d + 4), uint8
        As for `indexer_logits_paged`: of keys of 128 elements also 68 bytes, in e2m1.
    slots : array, (n,), int32 or int64
        Key i goes to page slots[i] // page_size, place slots[i] % page_size. A slot outside of the cache, -1 being the
        usual mark, is skipped. If several keys have the same slot, which of them wins is undefined.
    cos, sin : array, (max_position, rope_pairs), float32, optional
        As for `indexer_prepare_k`. Default: no RoPE, as for keys that have been rotated.
    positions : array, (n,), int32, optional
        Rows of cos and sin; clamped to them. Given with these, or not at all.
    norm_weight, norm_bias : array, (d,), float32, optional
        As for `indexer_prepare_k`.
    interleaved, hadamard, scales, reference_rounding, eps
        As for `indexer_prepare_k`. Scales of e2m1 are "power_of_2": 2**ceil(log2(max(amax, 1e-4) / 6)) of each 32
        elements; codes are rounded to nearest even and saturate. A group with a NaN gets a scale of NaN.
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
    """
    arrays = (k, cache, slots, cos, sin, positions, norm_weight, norm_bias)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    (cache,) = run(APPEND_OPERATION, arrays, options, exportable)
    return cache


def indexer_cache_gather(
    cache: jax.Array,
    slots: jax.Array,
    *,
    d: int | None = None,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Read index keys of a paged cache: what `indexer_logits` takes.

    For arrays of JAX: the notes of `mla_cupy.indexer_cache_gather` hold here, too.

    Parameters
    ----------
    cache : array
        As for `indexer_cache_append`.
    slots : array, (n,), int32 or int64
        A slot outside of the cache, such as -1, gives zeros.
    d : int, optional
        Elements of a key: 32, 64 or 128. With 128 records of 68 bytes are keys in e2m1: each becomes codes of e4m3 with
        one scale, which is exact where its scales are at most 2**14 apart; elements with a smaller one become zeros.
        Default: as many as a record has codes of e4m3, 64 of 68 bytes.
    codes : array, (n, d), uint8 or float8_e4m3fn, optional
        Whose memory the result takes over.
    k_scale : array, (n,), float32, optional
        Whose memory the result takes over.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    codes : array, (n, d), uint8
        Bits of e4m3.
    k_scale : array, (n,), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    It has no gradient.
    """
    arrays = (cache, slots, codes, k_scale)
    options = (d,)
    codes, k_scale = run(GATHER_OPERATION, arrays, options, exportable)
    return codes, k_scale
