"""Sparse attention, forward and backward: the specification of `mla_cupy.sparse_mla_*`, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.attend import attend
from mla_cupy.reference.cache import cache_gather, key_format
from mla_cupy.reference.fp8_queries import dequantised
from mla_cupy.reference.lse import has_no_weights, log_of_base

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def sparse_mla_forward(
    q: npt.ArrayLike,
    kv: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    d_v: int = 512,
    scale: float | None = None,
    topk_length: npt.ArrayLike | None = None,
    attn_sink: npt.ArrayLike | None = None,
    causal: bool = False,
    relative: bool = True,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    kv_scale: float = 1.0,
    kv_format: str | None = None,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -np.inf,
    out_dtype: str | None = None,
    rounding: str | None = None,
) -> tuple[Array, Array, Array]:
    """Attend from each query to the rows of `kv` that its indices select.

    out[i, h] = w[i, h] * sum_j softmax_j(scale * q[i, h] . kv[j]) * kv[j, :d_v], where j runs over the selected rows
    of query i and w = 1 / (1 + exp(attn_sink[h] - lse[i, h])), or 1 without a sink.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk)
        Absorbed queries.
    kv : array, (s_kv, d_qk) or (s_kv, 1, d_qk)
        Latents. The values are the first `d_v` elements of the keys. Or the pages of an FP8 record, (num_pages,
        page_size, width): row r is token r % page_size of page r / page_size.
    indices : array, (s_q, topk) or (s_q, 1, topk), integers
        The rows that each query attends to, counted from the start of its sequence, or of `kv`. A slot counts if
        0 <= index < limit, where the limit is the length of the sequence, or, if causal, what `selected_rows` says.
        Duplicates are counted as often as they occur.
    d_v : int
        Width of the values.
    scale : float, optional
        Factor of the scores, d_qk**-0.5 by default.
    topk_length : array, (s_q,), integers, optional
        Number of leading entries of each query that are read; clamped to [0, topk].
    attn_sink : array, (h_q,), optional
        Logits of one more key per head that has no value: it takes weight away. -inf has no effect, +inf gives out 0.
    causal : bool
        Hide the rows after a query's own position, the queries being the last of their sequence.
    relative : bool
        False if indices are row numbers of `kv`: see `selected_rows`.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), integers, optional
        Where the sequences begin, and where the last one ends, in `q` and in `kv`. Default: one sequence.
    kv_scale : float
        Scale of the record "fp8".
    kv_format : str, optional
        Name of the record, see `key_format`.
    math : str
        "exact", or "fp8": queries as `quantise_queries` leaves them, and in the rounding mode weights in e4m3.
    lse_base : str
        "e" or "2".
    empty_lse : float
        The `lse` of a query without a row.
    out_dtype : str, optional
        Dtype to which the rounding mode rounds `out`; default: the dtype of `q`.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: see `mla_decode`.

    Returns
    -------
    out : array, (s_q, h_q, d_v), float64
        0 for a query without a row.
    lse : array, (s_q, h_q), float64
        log(sum_j exp(scale * q . kv[j])), without the sink.
    max_logits : array, (s_q, h_q), float64
        max_j scale * q . kv[j]; -inf for a query without a row.

    Notes
    -----
    NaN or infinity in a row that a query does not select has no effect on the query.
    """
    q, kv, indices = np.asarray(q), np.asarray(kv), _without_head_axis(indices)
    s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if scale is None else scale
    s_kv, record = prod(kv.shape[:-1]), key_format(kv, d_qk, kv_format)
    rows_of = selected_rows(indices, s_kv, topk_length, causal, cu_seqlens_q, cu_seqlens_kv, relative)
    queries, weights, factor = q, rounding, 1.0
    if math == "fp8":
        queries = dequantised(q)
        if rounding is not None:  # the kernel multiplies the numbers as they are stored
            weights, factor, kv_scale, scale = "float8_e4m3fn", kv_scale, 1.0, scale * kv_scale

    out = np.zeros((s_q, h_q, d_v))
    lse, max_logits = np.full((2, s_q, h_q), -np.inf)
    for i, rows in enumerate(rows_of):
        keys = _keys(kv, rows, record, rounding, kv_scale)
        row_out, lse[i], max_logits[i] = attend(queries[i].astype(keys.dtype), keys, d_v, scale, weights)
        out[i] = factor * row_out
    if attn_sink is not None:
        out *= _share(lse, np.asarray(attn_sink, np.float64))[..., None]
    if rounding is not None:
        out = round_to(out, out_dtype or dtype_name(q.dtype))
    return out, np.where(lse == -np.inf, empty_lse, lse / log_of_base(lse_base)), max_logits


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def sparse_mla_backward(
    q: npt.ArrayLike,
    kv: npt.ArrayLike,
    out: npt.ArrayLike,
    dout: npt.ArrayLike,
    lse: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    dlse: npt.ArrayLike | None = None,
    d_v: int = 512,
    scale: float | None = None,
    topk_length: npt.ArrayLike | None = None,
    attn_sink: npt.ArrayLike | None = None,
    causal: bool = False,
    relative: bool = True,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    lse_base: str = "e",
    dkv_dtype: str | None = None,
    rounding: str | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of `sparse_mla_forward` with respect to `q`, `kv` and `attn_sink`.

    With P = exp(scale * q . kv[j] - lse_total), lse_total = log(exp(lse) + exp(attn_sink)), dP = dout . kv[j, :d_v],
    delta = sum(out * dout) and dS = scale * P * (dP - delta):

    dq = dS kv,   dkv = dS^T q + P^T dout (in the first d_v elements),   d_sink = -sum exp(attn_sink - lse_total) delta

    A gradient with respect to `lse` adds scale * exp(scale * q . kv[j] - lse) * dlse to dS, but where the sink is
    infinite: it leaves no gradient.

    Parameters
    ----------
    q, kv, indices
        As for the forward.
    out : array, (s_q, h_q, d_v)
        As the forward returned it.
    dout : array, (s_q, h_q, d_v)
        Gradient with respect to `out`.
    lse : array, (s_q, h_q)
        As the forward returned it. Both infinities mark a query without a row: it has no gradient, and neither has a
        query that selects no row, whatever its `lse`. Nor has one whose lse, in base 2, is 2^24 or more in magnitude:
        float32 no longer tells its weights there.
    dlse : array, (s_q, h_q), optional
        Gradient with respect to `lse`.
    d_v, scale, topk_length, attn_sink, causal, relative, cu_seqlens_q, cu_seqlens_kv, lse_base
        As for the forward.
    dkv_dtype : str, optional
        Dtype to which the rounding mode rounds `dkv`; default: the dtype of `kv`.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: float32 throughout, but P rounded to that format, and dS,
        which is made of it, and `dq` rounded to the dtype of `q`.

    Returns
    -------
    dq : array, shape of q, float64
    dkv : array, shape of kv, float64
        0 in rows that no query selects.
    d_sink : array, (h_q,), float64, or None
        None without `attn_sink`.
    """
    working = np.float64 if rounding is None else np.float32
    shape, kv, indices = np.shape(kv), _without_head_axis(kv), _without_head_axis(indices)
    q, out, dout = map(np.asarray, (q, out, dout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows_of = list(selected_rows(indices, len(kv), topk_length, causal, cu_seqlens_q, cu_seqlens_kv, relative))

    delta = (out.astype(working) * dout.astype(working)).sum(axis=-1)
    natural = np.asarray(lse).astype(np.float64) * log_of_base(lse_base)
    empty = has_no_weights(natural) | ~np.array([len(rows) > 0 for rows in rows_of], bool)[:, None]
    sink = np.full(q.shape[1], -np.inf) if attn_sink is None else np.asarray(attn_sink, np.float64)
    total = np.where(empty, np.inf, np.logaddexp(natural, sink)).astype(working)

    # P times this is the softmax without the sink; it is limited where P underflows.
    log_share = (sink - natural) / log(2)
    share = 1 + np.exp2(np.minimum(log_share, 1000 if rounding is None else 100))
    of_lse = np.zeros(natural.shape) if dlse is None else np.asarray(dlse, np.float64) / log_of_base(lse_base)
    subtracted = delta - np.where(empty | (total == np.inf), 0.0, of_lse * share).astype(working)

    dq, dkv = np.zeros(q.shape, working), np.zeros(kv.shape, working)
    for i, rows in enumerate(rows_of):
        keys, queries, d_out = kv[rows].astype(working), q[i].astype(working), dout[i].astype(working)
        live = ~empty[i]
        weights = np.exp(working(scale) * (queries @ keys.T) - total[i][:, None])
        weights = _rounded(weights, rounding)
        d_weights = d_out @ keys[:, :d_v].T
        d_scores = _rounded(working(scale) * weights * (d_weights - subtracted[i][:, None]), rounding)
        weights, d_scores = weights[live], d_scores[live]
        dq[i, live] = d_scores @ keys
        d_keys = d_scores.T @ queries[live]
        d_keys[:, :d_v] += weights.T @ d_out[live]
        np.add.at(dkv, rows, d_keys)

    d_sink = None
    if attn_sink is not None:
        d_sink = -np.where(empty, 0.0, _share(sink, natural) * delta).sum(axis=0)
    dq = _rounded(dq, rounding and dtype_name(q.dtype))
    dkv = _rounded(dkv, rounding and (dkv_dtype or dtype_name(kv.dtype)))
    return dq.astype(np.float64), dkv.astype(np.float64).reshape(shape), d_sink


def _keys(kv: Array, rows: Array, record: str | None, rounding: str | None, kv_scale: float = 1.0) -> Array:
    """Rows of a cache, dequantised, or of an array of them."""
    if record is None:
        found: Array = _without_head_axis(kv)[rows].astype(np.float64)
        return found
    cache = kv if kv.ndim > 2 else kv[:, None]
    keys = cache_gather(cache, rows, kv_format=record, kv_scale=kv_scale)[0].astype(np.float64)
    return keys if rounding is None else round_to(keys, rounding)


def selected_rows(
    indices: npt.ArrayLike,
    s_kv: int,
    topk_length: npt.ArrayLike | None = None,
    causal: bool = False,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    relative: bool = True,
) -> Iterator[Array]:
    """The rows of `kv` that each query attends to, in the order of its slots.

    Query i belongs to the first sequence n with cu_seqlens_q[n] <= i < cu_seqlens_q[n + 1]; if there is none, it has
    no row. Index j means row cu_seqlens_kv[n] + j, and counts if 0 <= j < limit; if not relative, it means row j, and
    counts if 0 <= j - cu_seqlens_kv[n] < limit. The limit is the length of the sequence; if causal, it is less by the
    number of queries of the sequence that come after query i. What cu_seqlens_kv holds is clamped to [0, s_kv], and a
    negative length is 0.

    Yields
    ------
    array, (n,), int64
        For each query.
    """
    indices = _without_head_axis(indices).astype(np.int64)
    s_q, topk = indices.shape
    lengths = np.full(s_q, topk) if topk_length is None else np.clip(np.asarray(topk_length), 0, topk)
    starts_q = np.array([0, s_q]) if cu_seqlens_q is None else np.asarray(cu_seqlens_q).astype(np.int64)
    starts_kv = np.array([0, s_kv]) if cu_seqlens_kv is None else np.clip(np.asarray(cu_seqlens_kv), 0, s_kv)
    for i in range(s_q):
        (owners,) = np.nonzero((starts_q[:-1] <= i) & (i < starts_q[1:]))
        if len(owners) == 0:
            yield np.zeros(0, np.int64)
            continue
        n = owners[0]
        limit = int(starts_kv[n + 1]) - int(starts_kv[n])
        if causal:
            limit -= int(starts_q[n + 1]) - 1 - i
        slots = indices[i, : lengths[i]] - (0 if relative else int(starts_kv[n]))
        yield int(starts_kv[n]) + slots[(slots >= 0) & (slots < limit)]


def _without_head_axis(x: npt.ArrayLike) -> Array:
    x = np.asarray(x)
    return x[:, 0] if x.ndim == 3 else x


def _share(mine: Array, other: Array) -> Array:
    """exp(mine) / (exp(mine) + exp(other)); all is mine where the other is -inf."""
    return np.where(other == -np.inf, 1.0, 1 / (1 + np.exp(other - mine)))


def _rounded(x: Array, name: str | None) -> Array:
    return x if name is None else round_to(x, name)
