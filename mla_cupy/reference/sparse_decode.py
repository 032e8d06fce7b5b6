"""Sparse decode from the records of a paged cache: the specification of `mla_cupy.sparse_mla_decode`, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import without_heads
from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.attend import attend
from mla_cupy.reference.cache import cache_gather, key_format
from mla_cupy.reference.dense_decode import turned_back
from mla_cupy.reference.fp8_queries import dequantised
from mla_cupy.reference.fp8_results import with_fp8
from mla_cupy.reference.lse import log_of_base
from mla_cupy.reference.projection import projected

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def sparse_mla_decode(
    q: npt.ArrayLike,
    kv_cache: Array,
    indices: npt.ArrayLike,
    *,
    topk_length: npt.ArrayLike | None = None,
    attn_sink: npt.ArrayLike | None = None,
    extra_kv_cache: Array | None = None,
    extra_indices: npt.ArrayLike | None = None,
    extra_topk_length: npt.ArrayLike | None = None,
    out_cos: npt.ArrayLike | None = None,
    out_sin: npt.ArrayLike | None = None,
    out_positions: npt.ArrayLike | None = None,
    w_uv: npt.ArrayLike | None = None,
    gate: npt.ArrayLike | None = None,
    scale: float | None = None,
    kv_scale: float = 1.0,
    kv_format: str | None = None,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -np.inf,
    out_dtype: Any = None,
    scales: str = "plain",
    rounding: str | None = None,
) -> tuple[Array, ...]:
    """Attend from each query to the tokens of a paged cache that its indices select.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk)
    kv_cache : array
        Pages of "v32", "v32-nope" for a d_qk of 512, "v4", "v41", "v41-fp4" or "fp8": see `cache_append`.
    indices : array, (b, s_q, topk), integers
        Slots: page * page_size + token. Those outside of the cache are skipped, duplicates counted as often as they
        occur.
    topk_length : array, (b,), integers, optional
        Number of entries of each list that are read; clamped to [0, topk].
    attn_sink : array, (h_q,), optional
        Logits of a key without a value.
    extra_kv_cache, extra_indices, extra_topk_length : array, optional
        A second cache of the same record, or of "v41-fp4", and more keys from it under the same softmax.
    out_cos, out_sin, out_positions : array, optional
        Tables and rows of them, (b, s_q), by which results are turned back: see `turned_back`.
    w_uv, gate : array, optional
        What results are multiplied by, see `projected`.
    scale, kv_scale, kv_format, math, lse_base, empty_lse, out_dtype, scales
        As for `mla_decode`.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels with tensor cores do: keys and weights in that format, float32
        scores and sums.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), or (b, s_q, h_q, d_head) with a `w_uv`, float64
    lse : array, (b, s_q, h_q), float64
        Without the sink.
    out_scales : array, (b, s_q, h_q, 4), float64
        Only of FP8 results, as of `mla_decode`.
    """
    queries = dequantised(np.asarray(q)) if math == "fp8" else np.asarray(q).astype(np.float64)
    b, s_q, h_q, d_qk = queries.shape
    scale = d_qk**-0.5 if scale is None else scale
    weights, factor = rounding, 1.0
    if math == "fp8" and rounding is not None:  # the kernel multiplies the numbers as they are stored
        weights, factor, kv_scale, scale = "float8_e4m3fn", kv_scale, 1.0, scale * kv_scale
    sources = [(kv_cache, indices, topk_length, key_format(kv_cache, d_qk, kv_format))]
    if extra_kv_cache is not None and extra_indices is not None:
        record = key_format(extra_kv_cache, d_qk, kv_format)
        sources.append((extra_kv_cache, extra_indices, extra_topk_length, record))
    out, lse = np.zeros((b, s_q, h_q, 512)), np.full((b, s_q, h_q), -np.inf)
    for i, s in np.ndindex(b, s_q):
        keys = np.concatenate([_selected(*source, i, s, kv_scale) for source in sources]).astype(np.float64)
        if rounding is not None:
            keys = round_to(keys, rounding)
        row_out, lse[i, s], _ = attend(queries[i, s].astype(keys.dtype), keys, 512, scale, weights)
        out[i, s] = factor * row_out
    if attn_sink is not None:
        sink = np.asarray(attn_sink, np.float64)
        out *= np.where(lse == -np.inf, 1.0, 1 / (1 + np.exp(sink - lse)))[..., None]
    if out_cos is not None:
        out = turned_back(out, out_cos, out_sin, np.asarray(out_positions))
    if w_uv is not None:
        out = projected(out, w_uv, gate, rounding)
    lse = np.where(lse == -np.inf, empty_lse, lse / log_of_base(lse_base))
    return with_fp8(out, lse, dtype_name(np.asarray(q).dtype), out_dtype, scales)


def _selected(
    cache: Array,
    indices: npt.ArrayLike,
    lengths: npt.ArrayLike | None,
    record: str | None,
    i: int,
    s: int,
    kv_scale: float,
) -> Array:
    """The keys that a list names."""
    cache, entries = without_heads(cache), np.asarray(indices)[i, s]
    length = len(entries) if lengths is None else int(np.clip(np.asarray(lengths)[i], 0, len(entries)))
    slots = entries[:length]
    slots = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
    return cache_gather(cache, slots, kv_format=record, kv_scale=kv_scale)[0]
