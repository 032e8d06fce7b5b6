"""The lightning indexer's scores: the specification of the logits, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import without_heads
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.reference.indexer_records import are_e2m1, e2m1_keys, page_parts

Array = npt.NDArray[Any]

MMA_ELEMENTS = 32
"""Elements of a row that tensor cores multiply and add at once."""
MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT = -121, 126
"""Exponents of the scale of float16 weights: the smallest normal number's; the largest with a normal inverse."""


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def indexer_logits(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    weights: npt.ArrayLike,
    ks: npt.ArrayLike | None = None,
    ke: npt.ArrayLike | None = None,
    *,
    k_scale: npt.ArrayLike | None = None,
    accumulate: str = "float32",
) -> Array:
    """Score every key for every query: I[t, s] = k_scale[s] * sum_h weights[t, h] * max(q[t, h] . k[s], 0).

    Parameters
    ----------
    q : array, (s_q, h, d)
        e4m3 codes, as such or as uint8, or bfloat16.
    k : array, (s_kv, d)
        Of the same kind.
    weights : array, (s_q, h)
        Of any sign; the scales of q and the factors h**-0.5 and d**-0.5 are folded in.
    ks, ke : array, (s_q,), integers, optional
        Query t sees the keys ks[t] <= s < ke[t]; both are clamped to [0, s_kv]. Default: all.
    k_scale : array, (s_kv,), optional
        Scales of the keys' codes. Default: 1.
    accumulate : str
        "float32": in float64, as everywhere in the oracle. "float16": with the roundings of a kernel with products and
        sums over heads in float16, so that numbers above 65,504 are infinite.

    Returns
    -------
    array, (s_q, s_kv), float64
        -inf outside the range.

    Notes
    -----
    A product that is not a number counts as 0, as max(NaN, 0) does in hardware; NaN in `weights` or `k_scale` stays.
    Keys outside a range have no effect, whatever they are.
    """
    q, k, weights = np.asarray(q), np.asarray(k), np.asarray(weights)
    s_q, s_kv = len(q), len(k)
    scales = np.ones(s_kv) if k_scale is None else np.asarray(k_scale).astype(np.float64)
    first, end = key_ranges(s_q, s_kv, ks, ke)
    scores = _scores_in_float16 if accumulate == "float16" else _scores
    logits = np.full((s_q, s_kv), -np.inf)
    for t, (a, b) in enumerate(zip(first, end, strict=True)):
        if a < b:
            logits[t, a:b] = scores(q[t], k[a:b], weights[t]) * scales[a:b]
    return logits


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def indexer_logits_paged(
    q: npt.ArrayLike,
    cache: npt.ArrayLike,
    weights: npt.ArrayLike,
    seqlens: npt.ArrayLike,
    block_table: npt.ArrayLike,
) -> Array:
    """Score the cached keys of each sequence for its next tokens.

    Parameters
    ----------
    q : array, (b, s_q, h, d)
    cache : array, (num_pages, page_size, d + 4), or with an axis of size 1 on either side of the tokens, uint8
        Codes and scales, see `indexer_records.page_parts`, or 68 bytes of keys of 128 elements, in e2m1; or (num_pages,
        page_size, d), bfloat16, without scales.
    weights : array, (b, s_q, h)
    seqlens : array, (b,), (b, 1) or (b, s_q), integers
        How many keys each token sees. From one number n per sequence, token i sees n - s_q + 1 + i.
    block_table : array, (b, max_pages), integers
        The pages of each sequence; entries that are not needed are not read. A page that does not exist has keys of 0.

    Returns
    -------
    array, (b, s_q, max_pages * page_size), float64
        -inf for keys that a token does not see.
    """
    q, cache, weights = np.asarray(q), np.asarray(cache), np.asarray(weights)
    cache = without_heads(cache)
    lengths, block_table = np.asarray(seqlens).astype(np.int64), np.asarray(block_table)
    b, s_q = q.shape[:2]
    if lengths.ndim == 1 or lengths.shape[1] != s_q:
        lengths = lengths.reshape(b, 1) - s_q + 1 + np.arange(s_q)
    num_pages, page_size = cache.shape[:2]
    keys, scales = cache, np.ones(cache.shape[:2])
    if are_e2m1(cache, q.shape[3]):
        keys = e2m1_keys(cache)
    elif cache.dtype == np.uint8:
        keys, scales = page_parts(cache)
    logits = np.full((b, s_q, block_table.shape[1] * page_size), -np.inf)
    for n in range(b):
        lengths[n] = np.clip(lengths[n], 0, logits.shape[2])
        count = int(lengths[n].max(initial=0))
        pages = block_table[n, : -(-count // page_size)].astype(np.int64)
        there = (pages >= 0) & (pages < num_pages)
        rows, factors = np.zeros((len(pages), *keys.shape[1:])), np.zeros((len(pages), page_size))
        rows[there], factors[there] = keys[pages[there]], scales[pages[there]]
        all_rows, all_factors = rows.reshape(-1, keys.shape[2]), factors.reshape(-1)
        for i, length in enumerate(lengths[n]):
            logits[n, i, :length] = _scores(q[n, i], all_rows[:length], weights[n, i]) * all_factors[:length]
    return logits


def key_ranges(
    s_q: int, s_kv: int, ks: npt.ArrayLike | None, ke: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first key of each query and the one after the last, both in [0, s_kv]; empty where the first is not less."""
    first = np.zeros(s_q, np.int64) if ks is None else np.clip(np.asarray(ks).astype(np.int64), 0, s_kv)
    end = np.full(s_q, s_kv, np.int64) if ke is None else np.clip(np.asarray(ke).astype(np.int64), 0, s_kv)
    return first, end


def _scores(q: Array, k: Array, weights: Array) -> Array:
    """sum_h weights[h] * max(q[h] . k[s], 0), without the scales of the keys."""
    products = _values(q) @ _values(k).T
    return weights.astype(np.float64) @ np.where(products > 0, products, 0.0)


def _scores_in_float16(q: Array, k: Array, weights: Array) -> Array:
    """Scores as tensor cores compute products of 32 elements, and four warps the sums of their pairs of heads."""
    scale = weight_scale(weights)
    shares = _half(weights.astype(np.float64) / scale)
    q, k = _values(q), _values(k)
    products = np.zeros((len(q), len(k)))
    for step in range(0, q.shape[1], MMA_ELEMENTS):
        part = slice(step, step + MMA_ELEMENTS)
        products = _half(products + q[:, part] @ k[:, part].T)
    sums = np.zeros((4, len(k)))
    for head, (share, row) in enumerate(zip(shares, products, strict=True)):
        warp = head // 2 % 4
        sums[warp] = _half(sums[warp] + share * np.where(row > 0, row, 0.0))
    total: Array = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale
    return total


def weight_scale(weights: Array) -> float:
    """The power of 2 by which a token's weights are divided to be less than 1/32 in float16.

    A warp has at most 32 heads, so that its sums are not larger than the largest product. NaN does not count.
    """
    largest = np.abs(weights[~np.isnan(weights)].astype(np.float64)).max(initial=0.0)
    exponent = int(np.frexp(largest)[1]) + 5 if np.isfinite(largest) else MAX_SCALE_EXPONENT
    return float(2.0 ** np.clip(exponent, MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT))


def _half(x: Array) -> Array:
    """Rounded to float16."""
    return x.astype(np.float16).astype(np.float64)


def _values(x: Array) -> Array:
    """Values of an array; bytes are e4m3 codes."""
    return (x.view(numpy_dtype("float8_e4m3fn")) if x.dtype == np.uint8 else x).astype(np.float64)
