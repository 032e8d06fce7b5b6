"""The losses that train the indexer, and their gradients: their specification, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import numpy_dtype
from mla_cupy.reference.lse import has_no_weights
from mla_cupy.reference.sparse import selected_rows

__all__ = ["SparseLoss", "WarmupLoss"]

Array = npt.NDArray[Any]
_E4M3 = numpy_dtype("float8_e4m3fn")


class SparseLoss(NamedTuple):
    """A loss per row, the normalisation of its rows, and the gradients of the sum of row_weights * kl.

    Attributes
    ----------
    kl : array, (s_q,) or, per head, (s_q, h)
        KL(p || softmax(I)) over the keys that the row sees; 0 for a row without a target.
    mass : array, shape of kl
        Divisor of the target. Per head: its log-sum-exp.
    index_lse : array, shape of kl
        log(sum(exp(I))); -inf for a row that sees no key.
    d_index_q, d_index_k, d_weights : array, or None without gradients
        Gradients in the shapes of index_q, index_k, weights.
    """

    kl: Array
    mass: Array
    index_lse: Array
    d_index_q: Array | None
    d_index_k: Array | None
    d_weights: Array | None


class WarmupLoss(NamedTuple):
    """A `SparseLoss`, and the attention that it was made of.

    Attributes
    ----------
    kl, mass, index_lse, d_index_q, d_index_k, d_weights : array
        As for a `SparseLoss`. The gradients may be None.
    out : array, (s_q, h, d_v), or None
        softmax(scale * q_h . k) v; 0 for a row that sees no key.
    attention_lse : array, (s_q, h), or None
        log(sum(exp(scale * q_h . k))); -inf for a row that sees no key.
    """

    kl: Array
    mass: Array
    index_lse: Array
    d_index_q: Array | None
    d_index_k: Array | None
    d_weights: Array | None
    out: Array | None
    attention_lse: Array | None


def indexer_warmup_loss(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    weights: npt.ArrayLike,
    *,
    q_rope: npt.ArrayLike | None = None,
    k_rope: npt.ArrayLike | None = None,
    k_scale: npt.ArrayLike | None = None,
    q_scale: npt.ArrayLike | None = None,
    v: npt.ArrayLike | None = None,
    lse: npt.ArrayLike | None = None,
    head_sums: npt.ArrayLike | None = None,
    row_weights: npt.ArrayLike | None = None,
    target: str = "head_sum",
    scale: float | None = None,
    target_scale: float = 1.0,
    causal: bool = True,
    gradients: bool = True,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
) -> WarmupLoss:
    """KL divergence from the main attention to the indexer's softmax, over all keys that a row sees.

    "head_sum": p = sum_h A_h / ||sum_h A_h||_1 with A_h = exp(scale * q_h . k - lse_h), and I[t, s] = sum_j W[t, j] *
    max(index_q[t, j] . index_k[s], 0) with W = weights * h_i**-0.5 * d_i**-0.5; one loss per row.

    "per_head": with equally many indexer and attention heads, p_h = softmax(target_scale * q_h . k) and I_h =
    weights[t, h] * max(index_q[t, h] . index_k[s], 0); one loss per row and head.

    Parameters
    ----------
    q : array, (s_q, h, d)
        Without their last columns, if these are in `q_rope`.
    k : array, (s_kv, d), or per KV head (s_kv, h_kv, d)
        Of all heads, or each of h / h_kv of them; without their last columns, if these are in `k_rope`.
    index_q : array, (s_q, h_i, d_i)
        e4m3 codes (as such or as uint8), or other numbers.
    index_k : array, (s_kv, d_i)
        Of the same kind.
    weights : array, (s_q, h_i)
        Of codes, with the scales of the queries and all other factors.
    q_rope : array, (s_q, h, d_rope), optional
        Last columns of the queries.
    k_rope : array, (s_kv, d_rope), (s_kv, 1, d_rope) or (s_kv, h_kv, d_rope), optional
        Last columns of the keys.
    k_scale : array, (s_kv,), optional
        Scales of the keys' codes. Default: 1.
    q_scale : array, (s_q, h_i), optional
        For codes: the scales that `weights` contain, for the gradient with respect to the numbers that the codes stand
        for. Default: 1, the gradient with respect to the codes.
    v : array, (s_kv, d_v), or per KV head (s_kv, h_kv, d_v), optional
        Values, for the attention's output and log-sum-exps.
    lse : array, (s_q, h), optional
        The attention's log-sum-exps, natural, for "head_sum". They may count keys that are not among k: the target is
        normalised again. A head whose lse is infinite, or 1.2e7 or more in magnitude, has no part in the target.
        Default: over the keys that are seen.
    head_sums : array, (s_q, s_kv), optional
        sum_h A_h, as of `indexer_head_sums`, in place of q, k and lse.
    row_weights : array, (s_q,), optional
        Factors of the losses in the gradients. Default: 1.
    target : str
    scale : float, optional
        Default: d**-0.5.
    target_scale : float
    causal : bool
        Hide the rows after a query's own position, the queries being the last of their sequence.
    gradients : bool
        Compute the gradients.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), integers, optional

    Returns
    -------
    WarmupLoss

    Notes
    -----
    With G = row_weights * (softmax(I) - p) and m = [index_q . index_k > 0]: d_index_q[t, j] = W sum_s G m index_k[s],
    d_index_k[s] = sum_tj G W m index_q[t, j], and dW[t, j] = sum_s G m index_q[t, j] . index_k[s]. No gradient flows to
    q and k.

    Of codes, I[t, s] = k_scale[s] * sum_j weights[t, j] * max(index_q[t, j] . index_k[s], 0), as `indexer_logits` has
    it, "per_head" likewise. The gradients are taken with respect to the numbers that the codes stand for, q_scale *
    index_q and k_scale * index_k, as if these had not been rounded, and with respect to `weights`.
    """
    s_q, s_kv = len(np.asarray(q)), len(np.asarray(k))
    every = np.broadcast_to(np.arange(s_kv), (s_q, s_kv))
    seen = list(selected_rows(every, s_kv, None, causal, cu_seqlens_q, cu_seqlens_kv))
    main = _main(q, k, q_rope, k_rope)
    index = _index(index_q, index_k, weights, k_scale, q_scale, target == "head_sum")
    sums = None if head_sums is None else [row[rows] for row, rows in zip(_double(head_sums), seen, strict=True)]
    loss = _loss(target, iter(seen), main, index, lse, row_weights, scale, target_scale, sums)
    made = (loss.d_index_q, loss.d_index_k, loss.d_weights) if gradients else (None, None, None)
    attention = (None, None) if v is None else _attention(main, _double(v), seen, scale)
    return WarmupLoss(loss.kl, loss.mass, loss.index_lse, *made, *attention)


def indexer_sparse_loss(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    weights: npt.ArrayLike,
    indices: npt.ArrayLike,
    *,
    k_scale: npt.ArrayLike | None = None,
    q_scale: npt.ArrayLike | None = None,
    lse: npt.ArrayLike | None = None,
    head_sums: npt.ArrayLike | None = None,
    topk_length: npt.ArrayLike | None = None,
    row_weights: npt.ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    relative: bool = True,
    gradients: bool = True,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
) -> SparseLoss:
    """The loss of `indexer_warmup_loss` with "head_sum", over the keys that `indices` select.

    Parameters
    ----------
    indices, topk_length, causal, relative, cu_seqlens_q, cu_seqlens_kv
        As for `sparse_mla_forward`: which slots count. A key that is selected twice counts twice.
    q, k, index_q, index_k, weights, k_scale, q_scale, lse, row_weights, scale
        As for `indexer_warmup_loss`, with keys that all heads share; by default, `lse` is over the selected keys.
    head_sums : array, (s_q, topk), optional
        sum_h A_h, as of `indexer_head_sums`: a row's n-th number belongs to its n-th valid index.
    gradients : bool
        Compute the gradients.

    Returns
    -------
    SparseLoss
    """
    s_kv = len(np.asarray(k))
    selected = list(selected_rows(indices, s_kv, topk_length, causal, cu_seqlens_q, cu_seqlens_kv, relative))
    main, index = _main(q, k), _index(index_q, index_k, weights, k_scale, q_scale)
    sums = None if head_sums is None else [x[: len(rows)] for x, rows in zip(_double(head_sums), selected, strict=True)]
    loss = _loss("head_sum", iter(selected), main, index, lse, row_weights, scale, 1.0, sums)
    return loss if gradients else loss._replace(d_index_q=None, d_index_k=None, d_weights=None)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def indexer_head_sums(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    *,
    q_rope: npt.ArrayLike | None = None,
    k_rope: npt.ArrayLike | None = None,
    indices: npt.ArrayLike | None = None,
    lse: npt.ArrayLike | None = None,
    topk_length: npt.ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    relative: bool = True,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
) -> Array:
    """Sum that the losses of the indexer normalise to their target: sum_h exp(scale * q_h . k - lse_h), heads of q.

    Parameters
    ----------
    q, k, q_rope, k_rope, lse, scale, cu_seqlens_q, cu_seqlens_kv
        As for `indexer_warmup_loss`.
    indices, topk_length, relative
        As for `indexer_sparse_loss`.
    causal : bool
        As for these.

    Returns
    -------
    array, (s_q, s_kv), or (s_q, topk) with indices
        0 where a row does not see a key; with indices, its numbers are in the order of those that count.
    """
    main = _main(q, k, q_rope, k_rope)
    s_q, s_kv, scale = len(main.q), len(main.k), main.scale(scale)
    every = np.broadcast_to(np.arange(s_kv), (s_q, s_kv)) if indices is None else np.asarray(indices)
    every = every.reshape(s_q, every.shape[-1])
    sums = np.zeros(every.shape)
    for t, rows in enumerate(selected_rows(every, s_kv, topk_length, causal, cu_seqlens_q, cu_seqlens_kv, relative)):
        given = None if lse is None else _double(lse)[t]
        to = rows if indices is None else np.arange(len(rows))
        sums[t, to] = _head_sum(scale * main.products(t, rows), given)[0]
    return sums


class _Main(NamedTuple):
    """The main attention's queries, and its keys as (s_kv, h_kv, d)."""

    q: Array
    k: Array

    def scale(self, given: float | None) -> float:
        """The factor of the scores."""
        return float(self.q.shape[2] ** -0.5) if given is None else given

    def products(self, t: int, rows: Array) -> Array:
        """Products of the heads of a token with keys, (h, rows)."""
        (h, d), h_kv = self.q[t].shape, self.k.shape[1]
        found: Array = self.q[t].reshape(h_kv, h // h_kv, d) @ self.k[rows].transpose(1, 2, 0)
        return found.reshape(h, len(rows))


class _Index(NamedTuple):
    """The indexer's arrays, and the factors of weights, keys and queries: without codes 1, except for the weights."""

    q: Array
    k: Array
    weights: Array
    unit: float
    k_scale: Array
    q_scale: Array


def _main(
    q: npt.ArrayLike, k: npt.ArrayLike, q_rope: npt.ArrayLike | None = None, k_rope: npt.ArrayLike | None = None
) -> _Main:
    queries, keys = _double(q), _per_head(k)
    if q_rope is not None:
        queries = np.concatenate([queries, _double(q_rope)], axis=2)
    if k_rope is not None:
        rope = _per_head(k_rope)
        keys = np.concatenate([keys, np.broadcast_to(rope, (*keys.shape[:2], rope.shape[2]))], axis=2)
    return _Main(queries, keys)


def _per_head(x: npt.ArrayLike) -> Array:
    """(keys, heads, width), of one head where there is no such axis."""
    x = _double(x)
    return x[:, None] if x.ndim == 2 else x


def _index(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    weights: npt.ArrayLike,
    k_scale: npt.ArrayLike | None,
    q_scale: npt.ArrayLike | None,
    summed: bool = True,
) -> _Index:
    coded = np.asarray(q).dtype in (np.uint8, _E4M3)
    queries, keys, folded = _numbers(q), _numbers(k), _double(weights)
    unit = (queries.shape[1] * queries.shape[2]) ** -0.5 if summed and not coded else 1.0
    of_keys = np.ones(len(keys)) if k_scale is None else _double(k_scale)
    of_queries = np.ones(folded.shape) if q_scale is None else _double(q_scale)
    return _Index(queries, keys, folded, unit, of_keys, of_queries)


def _numbers(x: npt.ArrayLike) -> Array:
    """Values of e4m3 codes, as bytes, or of other numbers."""
    x = np.asarray(x)
    return _double(x.view(_E4M3) if x.dtype == np.uint8 else x)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def _loss(
    target: str,
    rows_of: Iterator[Array],
    main: _Main,
    index: _Index,
    lse: npt.ArrayLike | None,
    row_weights: npt.ArrayLike | None,
    scale: float | None,
    target_scale: float,
    head_sums: list[Array] | None,
) -> SparseLoss:
    s_q, h, _ = main.q.shape
    summed = target == "head_sum"
    factors = np.ones(s_q) if row_weights is None else _double(row_weights)
    scale = main.scale(scale)
    kl, mass, own = (np.zeros((s_q, 1 if summed else h)) for _ in range(3))
    d_index_q, d_index_k, d_weights = (np.zeros_like(x) for x in (index.q, index.k, index.weights))
    for t, rows in enumerate(rows_of):
        products, scales = index.q[t] @ index.k[rows].T, index.k_scale[rows]
        weights = index.unit * index.weights[t][:, None]
        scores = weights * np.maximum(products, 0) * scales
        given = None if lse is None else _double(lse)[t]
        if summed:
            scores = scores.sum(axis=0)[None]
            target_rows = _head_sum(scale * main.products(t, rows), given) if head_sums is None else head_sums[t][None]
            mass[t] = target_rows.sum()
        else:
            mass[t], target_rows = _softmax(target_scale * main.products(t, rows))
        kl[t], own[t], d_scores = _divergence(target_rows, scores)
        if not summed:
            dead = has_no_weights(mass[t]) | has_no_weights(own[t])
            kl[t, dead], d_scores[dead] = 0, 0
        d_scores = factors[t] * d_scores * (products > 0)  # (h_i, rows); one row of d_scores serves all heads
        d_products = weights * d_scores
        d_index_q[t] = d_products @ (scales[:, None] * index.k[rows]) / index.q_scale[t][:, None]
        np.add.at(d_index_k, rows, d_products.T @ index.q[t])
        d_weights[t] = index.unit * (d_scores * products * scales).sum(axis=1)
    if summed:
        kl, mass, own = kl[:, 0], mass[:, 0], own[:, 0]
    return SparseLoss(kl, mass, own, d_index_q, d_index_k, d_weights)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def _attention(main: _Main, v: Array, seen: list[Array], scale: float | None) -> tuple[Array, Array]:
    """The output and the log-sum-exps."""
    (s_q, h, _), v, scale = main.q.shape, _per_head(v), main.scale(scale)
    lse = np.full((s_q, h), -np.inf)
    out = np.zeros((s_q, h, v.shape[2]))
    for t, rows in enumerate(seen):
        lse[t], softmax = _softmax(scale * main.products(t, rows))
        if len(rows):
            of_heads = softmax.reshape(v.shape[1], -1, len(rows)) @ v[rows].transpose(1, 0, 2)
            out[t] = of_heads.reshape(h, v.shape[2])
    return out, lse


def _head_sum(logits: Array, lse: Array | None) -> Array:
    """sum_h exp(logits - lse), (1, n), not normalised."""
    lse = _softmax(logits)[0] if lse is None else lse
    live = np.isfinite(lse) & ~has_no_weights(lse)
    parts: Array = np.exp(logits[live] - lse[live][:, None]).sum(axis=0)[None]
    return parts


def _softmax(logits: Array) -> tuple[Array, Array]:
    """The log-sum-exp of each row, -inf where there is nothing, and its softmax."""
    top = logits.max(axis=1, initial=-np.inf)
    shifted = np.exp(logits - np.where(np.isinf(top), 0, top)[:, None])
    total = shifted.sum(axis=1)
    return np.where(total > 0, top + np.log(total), -np.inf), shifted / total[:, None]


def _divergence(target: Array, scores: Array) -> tuple[Array, Array, Array]:
    """KL(target / its sum || softmax(scores)) of each row, the scores' log-sum-exp, and the gradient by the scores.

    A row without mass has neither a divergence nor a gradient. p log p is 0 where p is.
    """
    lse, softmax = _softmax(scores)
    total = target.sum(axis=1, keepdims=True)
    p = np.where(total > 0, target / total, 0.0)
    there = (total[:, 0] > 0) & np.isfinite(lse)
    terms = np.where(p > 0, p * (np.log(p) - scores), 0.0).sum(axis=1)
    kl = np.where(there, terms + lse, 0.0)
    return kl, lse, np.where(there[:, None], softmax - p, 0.0)


def _double(x: npt.ArrayLike) -> Array:
    return np.asarray(x).astype(np.float64)
