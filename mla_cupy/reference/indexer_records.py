"""Indexer queries and keys before the logits, and the paged cache of index keys: RoPE, Hadamard, e4m3, records.

The arithmetic is float32 in the order of the kernels, so that codes and scales are equal byte by byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import without_heads
from mla_cupy.dtypes import numpy_dtype, round_to
from mla_cupy.reference.cache import from_e2m1, to_e2m1

Array = npt.NDArray[Any]

MAX_CODE = 448.0
"""The largest finite e4m3."""
FLOAT16_HEADROOM = 57344.0
"""Limit of products in float16, which ends at 65,504: 128 x 448."""
MIN_AMAX = 1e-4
"""A vector's largest magnitude counts as at least this, so that zeros have a scale."""
SCALE_BYTES = 4
"""Bytes of a record's scale: after the codes of a page come its scales, float32."""


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def indexer_prepare_q(
    q: npt.ArrayLike,
    weights: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    positions: npt.ArrayLike,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
) -> tuple[Array, Array]:
    """Rotate and quantise indexer queries, and fold their scales into the weights.

    Parameters
    ----------
    q : array, (s_q, h, d)
        Before RoPE. d is a power of 2.
    weights : array, (s_q, h)
        Weights of the heads.
    cos, sin : array, (max_position, d_rope / 2), float32
        RoPE acts on the first d_rope elements of a vector.
    positions : array, (s_q,), integers
        Rows of cos and sin; clamped to them.
    interleaved : bool
        Whether RoPE turns elements (2i, 2i + 1), or (i, i + d_rope / 2), the default.
    hadamard : bool
        Whether to multiply by the Hadamard matrix of order d, times d**-0.5.
    scales : str
        "power_of_2": 2**ceil(log2(amax / 448)); "plain": amax / 448.
    reference_rounding : bool
        Round to bfloat16 after RoPE and after the Hadamard transform, as the model's own code does.
    accumulate : str
        What `indexer_logits` adds products up in: for "float16", codes are at most `max_query_code(d)`, which takes the
        place of 448.

    Returns
    -------
    codes : array, (s_q, h, d), float64
        Values of e4m3: vector / scale, rounded.
    folded : array, (s_q, h), float64
        weights * h**-0.5 * scale * d**-0.5, float32 at every step.
    """
    x, weights = np.asarray(q), np.asarray(weights).astype(np.float32)
    turned = rotate(x, cos, sin, np.asarray(positions)[:, None], interleaved, reference_rounding)
    _, heads, d = x.shape
    max_code = max_query_code(d) if accumulate == "float16" else MAX_CODE
    codes, factors = quantise(_transformed(turned, hadamard, reference_rounding), scales, max_code)
    folded = weights * np.float32(heads**-0.5) * factors * np.float32(d**-0.5)
    return codes.astype(np.float64), folded.astype(np.float64)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def indexer_prepare_k(
    k: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    positions: npt.ArrayLike,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: npt.ArrayLike | None = None,
    norm_bias: npt.ArrayLike | None = None,
    eps: float = 1e-6,
) -> tuple[Array, Array]:
    """Rotate and quantise index keys: as `indexer_prepare_q`, for one vector per token.

    Parameters
    ----------
    k : array, (s_kv, d)
        Before RoPE; after its LayerNorm, unless this is given.
    cos, sin, positions, interleaved, hadamard, scales, reference_rounding
        As for `indexer_prepare_q`.
    norm_weight, norm_bias, eps
        As for `layer_norm`, which comes first. Default: none.

    Returns
    -------
    codes : array, (s_kv, d), float64
    k_scale : array, (s_kv,), float64
    """
    norm = norm_weight, norm_bias, eps
    x = _transformed_keys(k, (cos, sin, positions), norm, interleaved, hadamard, reference_rounding)
    codes, factors = quantise(x, scales)
    return codes.astype(np.float64), factors.astype(np.float64)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def _transformed_keys(
    k: npt.ArrayLike,
    rope: tuple[Any, Any, Any],
    norm: tuple[Any, Any, float],
    interleaved: bool,
    hadamard: bool,
    rounded: bool,
) -> Array:
    """Keys before they are quantised."""
    x, (cos, sin, positions), (weight, bias, eps) = np.asarray(k), rope, norm
    if weight is not None and bias is not None:
        x = layer_norm(x, weight, bias, eps)
        x = round_to(x, "bfloat16") if rounded else x
    turned = rotate(x, cos, sin, np.asarray(positions), interleaved, rounded)
    return _transformed(turned, hadamard, rounded)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def indexer_prepare(
    q: npt.ArrayLike,
    weights: npt.ArrayLike,
    k: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    positions: npt.ArrayLike,
    cache: Array | None = None,
    slots: npt.ArrayLike | None = None,
    *,
    norm_weight: npt.ArrayLike | None = None,
    norm_bias: npt.ArrayLike | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
) -> tuple[Array, Array, Array | None, Array | None]:
    """Prepare the queries and keys of the same tokens: `indexer_prepare_q`, then `indexer_prepare_k` or the append.

    Parameters
    ----------
    q, weights, interleaved, hadamard, scales, reference_rounding, accumulate
        As for `indexer_prepare_q`.
    k : array, (n, d)
    cos, sin, positions
        For both.
    cache, slots
        As for `indexer_cache_append`. Default: the keys are returned.
    norm_weight, norm_bias, eps
        As for `indexer_prepare_k`.

    Returns
    -------
    codes, folded
        As of `indexer_prepare_q`.
    k_codes, k_scale
        As of `indexer_prepare_k`; None with a cache.
    """
    chosen: dict[str, Any] = {"interleaved": interleaved, "hadamard": hadamard, "scales": scales}
    chosen["reference_rounding"] = reference_rounding
    codes, folded = indexer_prepare_q(q, weights, cos, sin, positions, **chosen, accumulate=accumulate)
    norm: dict[str, Any] = {"norm_weight": norm_weight, "norm_bias": norm_bias, "eps": eps}
    if cache is None or slots is None:
        return codes, folded, *indexer_prepare_k(k, cos, sin, positions, **chosen, **norm)
    rope: dict[str, Any] = {"cos": cos, "sin": sin, "positions": positions}
    indexer_cache_append(k, cache, slots, **rope, **chosen, **norm)
    return codes, folded, None, None


def layer_norm(x: Array, weight: npt.ArrayLike, bias: npt.ArrayLike, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias along the last axis, in float32 with a rounding at each step.

    Sums are made of pairs: of elements d / 2 apart, then half as far, down to 32; then of 2, 1, and of 4, 8, 16.
    """
    d = x.shape[-1]
    x = x.astype(np.float32)
    weight, bias = (np.asarray(each).astype(np.float32) for each in (weight, bias))
    centred = x - _sum(x) * np.float32(1 / d)
    variance = _sum(centred * centred) * np.float32(1 / d)
    normal: Array = centred * (np.float32(1) / np.sqrt(variance + np.float32(eps))) * weight + bias
    return normal


def _sum(x: Array) -> Array:
    """The sums along the last axis, which stays with a size of 1: see `layer_norm`."""
    at = np.arange(x.shape[-1])
    far = [1 << i for i in range(5, x.shape[-1].bit_length() - 1)][::-1]
    for step in (*far, 2, 1, 4, 8, 16):
        x = x + x[..., at ^ step]
    return x[..., :1]


def rotate(
    x: Array, cos: npt.ArrayLike, sin: npt.ArrayLike, positions: Array, interleaved: bool, rounded: bool
) -> Array:
    """RoPE on the first elements of x (..., d), float32; `positions` has, or broadcasts to, the axes before d."""
    tables = [np.asarray(table).astype(np.float32) for table in (cos, sin)]
    c, s = (table[np.clip(positions, 0, len(table) - 1)] for table in tables)
    half = c.shape[-1]
    x = x.astype(np.float32)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = a * c - b * s
    turned[..., second] = a * s + b * c
    return round_to(turned, "bfloat16") if rounded else turned


def hadamard_transform(x: Array) -> Array:
    """H x * d**-0.5 along the last axis of length d, a power of 2: a butterfly in float32, neighbours first."""
    d = x.shape[-1]
    step = 1
    while step < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        step *= 2
    scaled: Array = x * np.float32(d**-0.5)
    return scaled


def _transformed(x: Array, wanted: bool, rounded: bool) -> Array:
    if not wanted:
        return x
    y = hadamard_transform(x)
    return round_to(y, "bfloat16") if rounded else y


def max_query_code(d: int) -> float:
    """The largest query code with finite float16 products for any keys: d x 448 x this is 57,344."""
    return FLOAT16_HEADROOM / (d * MAX_CODE)


def quantise(x: Array, scale: str, max_code: float = MAX_CODE) -> tuple[Array, Array]:
    """Codes of e4m3 up to `max_code`, and one float32 scale per vector (..., d).

    The scale comes from the largest magnitude that is a number, infinities counted as the largest float; codes
    saturate, and NaN stays NaN.
    """
    magnitudes = np.where(np.isnan(x), 0, np.minimum(np.abs(x), np.finfo(np.float32).max)).astype(np.float32)
    amax = np.maximum(magnitudes.max(axis=-1), np.float32(MIN_AMAX))
    scales = amax * np.float32(1 / max_code)
    if scale == "power_of_2":
        scales = _power_of_2(scales)
    ratio = x / scales[..., None]
    return round_to(np.clip(ratio, -max_code, max_code), "float8_e4m3fn"), scales


def _power_of_2(x: Array) -> Array:
    """2**ceil(log2(x)), from the bits: the exponent, and one more if the mantissa is not 0; 2**126 at most."""
    bits = x.view(np.uint32)
    exponents = np.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0), 253)
    scales: Array = (exponents << 23).astype(np.uint32).view(np.float32)
    return scales


# ---- Keys in e2m1 ------------------------------------------------------------------------------------------------

E2M1_WIDTH, E2M1_GROUP = 128, 32
"""Elements of a key in e2m1, and of a group that shares a scale."""
MAX_E2M1 = 6.0
NAN_SCALE = 0xFF
"""The exponent of NaN."""


def are_e2m1(cache: Array, d: int) -> bool:
    """True for a cache of keys of d elements in e2m1: 64 bytes of codes, then four exponents."""
    return d == E2M1_WIDTH and cache.shape[-1] == d // 2 + SCALE_BYTES


@np.errstate(all="ignore")
def quantise_to_e2m1(x: Array) -> tuple[Array, Array]:
    """Codes (n, d / 2) and exponents (n, d / 32), both uint8, of float32 vectors (n, d).

    Of two elements in a byte the first one is in the lower half. The scale of a group is 2**ceil(log2(amax / 6)), with
    amax at least 1e-4 and infinities counted as the largest float; codes saturate. A group with a NaN has codes of 0
    and a scale of NaN.
    """
    groups = x.astype(np.float32).reshape(len(x), -1, E2M1_GROUP)
    magnitudes = np.minimum(np.abs(groups), np.finfo(np.float32).max)
    amax = np.maximum(magnitudes.max(axis=-1), np.float32(MIN_AMAX))
    has_nan = np.isnan(groups).any(axis=-1)
    scales = _power_of_2(np.where(has_nan, np.float32(1), amax / np.float32(MAX_E2M1)).astype(np.float32))
    exponents = np.where(has_nan, NAN_SCALE, scales.view(np.uint32) >> 23).astype(np.uint8)
    codes = to_e2m1((groups / scales[..., None]).reshape(x.shape))
    no_number = np.repeat(has_nan, E2M1_GROUP // 2, axis=-1)
    return np.where(no_number, np.uint8(0), codes), exponents


def e2m1_keys(cache: Array) -> Array:
    """The keys of a cache in e2m1, (num_pages, page_size, 128) in float64: elements times their scales."""
    num_pages, page_size = cache.shape[:2]
    d, pages = E2M1_WIDTH, cache.reshape(num_pages, -1)
    codes = pages[:, : page_size * d // 2].reshape(num_pages, page_size, d // 2)
    exponents = pages[:, page_size * d // 2 :].reshape(num_pages, page_size, SCALE_BYTES).astype(np.float64)
    scales = np.where(exponents == NAN_SCALE, np.nan, 2.0 ** (exponents - 127))
    keys: Array = from_e2m1(codes).astype(np.float64) * np.repeat(scales, E2M1_GROUP, axis=-1)
    return keys


def as_e4m3(cache: Array) -> tuple[Array, Array]:
    """The keys of a cache in e2m1: values of e4m3, (num_pages, page_size, 128), and one scale for each key.

    The scale is the largest that is a number of the key's, times 2**-6, so that values are at most 6 * 2**6. That
    is exact where scales are at most 2**14 apart: groups with a smaller one are zeros. A scale of NaN makes NaN.
    """
    exponents = cache.reshape(len(cache), -1)[:, cache.shape[1] * E2M1_WIDTH // 2 :]
    exponents = exponents.reshape(*cache.shape[:2], SCALE_BYTES).astype(np.int64)
    largest = np.where(exponents == NAN_SCALE, 0, exponents).max(axis=-1, initial=0)
    scales = 2.0 ** (largest - 127.0 - 6)
    too_small = np.repeat((largest[..., None] - exponents > 14), E2M1_GROUP, axis=-1)
    values: Array = e2m1_keys(cache) / scales[..., None]
    return np.where(too_small, 0.0, values), scales


def append_e2m1(cache: Array, x: Array, slots: npt.ArrayLike) -> None:
    """Write transformed keys to slots of a cache in e2m1, in place, as `append_records`."""
    num_pages, page_size = cache.shape[:2]
    pages, split = cache.reshape(num_pages, -1), page_size * E2M1_WIDTH // 2
    for key, exponents, slot in zip(*quantise_to_e2m1(x), np.asarray(slots).astype(np.int64), strict=True):
        if 0 <= slot < num_pages * page_size:
            page, at = divmod(int(slot), page_size)
            pages[page, at * len(key) : (at + 1) * len(key)] = key
            pages[page, split + at * SCALE_BYTES : split + (at + 1) * SCALE_BYTES] = exponents


# ---- The paged cache ---------------------------------------------------------------------------------------------


def page_parts(cache: Array) -> tuple[Array, Array]:
    """Codes (num_pages, page_size, d) and the scales (num_pages, page_size) of a cache, as views of its memory.

    A page of the cache, (num_pages, page_size, d + 4) or with an axis of size 1, uint8, holds the codes of all its
    tokens, then their scales: its last axes are contiguous, and say how many bytes it has, not where they are.
    """
    cache = without_heads(cache)
    num_pages, page_size, width = cache.shape
    d = width - SCALE_BYTES
    pages = cache.reshape(num_pages, page_size * width)
    codes = pages[:, : page_size * d].reshape(num_pages, page_size, d).view(numpy_dtype("float8_e4m3fn"))
    return codes, pages[:, page_size * d :].view(np.float32)


def append_records(cache: Array, codes: npt.ArrayLike, scales: npt.ArrayLike, slots: npt.ArrayLike) -> None:
    """Write keys to slots of a cache, in place: slot = page * page_size + token; any other number is skipped."""
    parts, page_scales = page_parts(cache)
    num_pages, page_size, _ = parts.shape
    codes, slots = np.asarray(codes), np.asarray(slots).astype(np.int64)
    values = np.where(np.isnan(codes), np.nan, codes).astype(parts.dtype)  # there is one NaN: 0x7f
    for value, scale, slot in zip(values, np.asarray(scales), slots, strict=True):
        if 0 <= slot < num_pages * page_size:
            parts[slot // page_size, slot % page_size] = value
            page_scales[slot // page_size, slot % page_size] = scale


def indexer_cache_append(
    k: npt.ArrayLike,
    cache: Array,
    slots: npt.ArrayLike,
    *,
    cos: npt.ArrayLike | None = None,
    sin: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: npt.ArrayLike | None = None,
    norm_bias: npt.ArrayLike | None = None,
    eps: float = 1e-6,
) -> tuple[()]:
    """Write index keys to a paged cache, in place: `indexer_prepare_k`, then `append_records`.

    Parameters
    ----------
    k : array, (n, d)
    cache : array, (num_pages, page_size, d + 4), uint8
        An axis of size 1 may stand on either side of the tokens. Pages may be any distance apart. Of keys of 128
        elements also 68 bytes, in e2m1: see `quantise_to_e2m1`.
    slots : array, (n,), integers
        slot = page * page_size + token; any other number is skipped. Of equal slots one key wins.
    cos, sin, positions : array, optional
        As for `indexer_prepare_k`. Default: no RoPE.
    interleaved, hadamard, scales, reference_rounding, norm_weight, norm_bias, eps
        As for `indexer_prepare_k`.
    """
    cache = without_heads(cache)
    if cos is None or sin is None or positions is None:
        cos = sin = np.zeros((1, 0), np.float32)
        positions = np.zeros(len(np.asarray(k)), np.int32)
    chosen: dict[str, Any] = {
        "interleaved": interleaved,
        "hadamard": hadamard,
        "reference_rounding": reference_rounding,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "eps": eps,
    }
    if are_e2m1(cache, np.asarray(k).shape[1]):
        norm = norm_weight, norm_bias, eps
        x = _transformed_keys(k, (cos, sin, positions), norm, interleaved, hadamard, reference_rounding)
        append_e2m1(cache, x, slots)
        return ()
    codes, key_scales = indexer_prepare_k(k, cos, sin, positions, scales=scales, **chosen)
    append_records(cache, codes, key_scales, slots)
    return ()


def indexer_cache_gather(cache: Array, slots: npt.ArrayLike, *, d: int | None = None) -> tuple[Array, Array]:
    """Read index keys of a paged cache.

    Parameters
    ----------
    cache : array
        As for `indexer_cache_append`.
    slots : array, (n,), integers
        A slot outside of the cache, such as -1, gives zeros.
    d : int, optional
        Elements of a key. With 128 elements in 68 bytes, keys are e2m1, see `as_e4m3`. Default: the number of codes.

    Returns
    -------
    codes : array, (n, d), float64
        Values of e4m3.
    k_scale : array, (n,), float64
    """
    cache = without_heads(cache)
    in_e2m1 = d is not None and are_e2m1(cache, d)
    parts, page_scales = as_e4m3(cache) if in_e2m1 else page_parts(cache)
    num_pages, page_size, width = parts.shape
    where = np.asarray(slots).astype(np.int64)
    (live,) = np.nonzero((where >= 0) & (where < num_pages * page_size))
    pages, tokens = np.divmod(where[live], max(1, page_size))
    codes, scales = np.zeros((len(where), width)), np.zeros(len(where))
    codes[live] = parts[pages, tokens].astype(np.float64)
    scales[live] = page_scales[pages, tokens]
    return codes, scales
