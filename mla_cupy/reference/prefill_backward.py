"""Gradients of dense attention with keys and values per head, in float64: the specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.lse import has_no_weights
from mla_cupy.reference.prefill import joined, seen_keys

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def mla_prefill_backward(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    out: npt.ArrayLike,
    dout: npt.ArrayLike,
    lse: npt.ArrayLike,
    *,
    q_rope: npt.ArrayLike | None = None,
    k_rope: npt.ArrayLike | None = None,
    dlse: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    causal: bool = True,
    scale: float | None = None,
    rounding: str | None = None,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of `mla_prefill` with respect to queries, keys and values.

    With P = exp(scale * q . k - lse), dP = dout . v, delta = sum(out * dout) - dlse and dS = scale * P * (dP - delta):

    dq = dS k,   dk = dS^T q,   dv = P^T dout

    summed over the query heads of a KV head, and the keys' last columns over the heads that share them.

    Parameters
    ----------
    q, k, v, q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, causal, scale
        As for the forward.
    out, dout : array, (s_q, h_q, d_v)
        What the forward returned, or a merge of it with the attention to other keys, and the gradient of that.
    lse, dlse : array, (s_q, h_q)
        The same of `lse`. Either infinity marks a query without a key: it has no gradient, and contributes none. Nor
        does one whose lse, in base 2, is 2^24 or more in magnitude: float32 no longer tells its weights there.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: float32 throughout, but P rounded to that format, and dS,
        which is made of it, and the results rounded to the dtype of `q`.

    Returns
    -------
    dq, dk, dv : array, shapes of q, k and v, float64
        0 for a query without a key, for a key that no query sees, and for its value.
    dq_rope, dk_rope : array, shapes of q_rope and k_rope, float64, or None
        None where these are not given.

    Notes
    -----
    A query and the keys that it does not see have no influence on each other's gradients, whatever they contain.
    """
    exact = np.float64 if rounding is None else np.float32
    whole_q, whole_k = joined(q, q_rope), joined(k, k_rope)
    queries, keys, values = (x.astype(exact) for x in (whole_q, whole_k, np.asarray(v)))
    d_out = np.asarray(dout).astype(exact)
    lse = np.asarray(lse, np.float64)
    live = ~has_no_weights(lse)
    s_q, h_q, d_qk = queries.shape
    group = h_q // keys.shape[1]
    scale = exact(d_qk**-0.5 if scale is None else scale)
    delta = (np.asarray(out).astype(exact) * d_out).sum(axis=-1)
    delta = delta - (0 if dlse is None else np.asarray(dlse).astype(exact))

    dq, dk, dv = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    for row in seen_keys(s_q, len(keys), cu_seqlens_q, cu_seqlens_kv, causal):
        for h in np.flatnonzero(live[row.query]):
            at, seen = (row.query, h), (slice(row.begin, row.end), h // group)
            weights = _rounded(np.exp(scale * (keys[seen] @ queries[at]) - exact(lse[at])), rounding)
            d_scores = _rounded(scale * weights * (values[seen] @ d_out[at] - delta[at]), rounding)
            dq[at] = d_scores @ keys[seen]
            dk[seen] += np.outer(d_scores, queries[at])
            dv[seen] += np.outer(weights, d_out[at])
    dtype = rounding and dtype_name(np.asarray(q).dtype)
    (first_q, last_q), (first_k, last_k) = _apart(dq, q_rope), _apart(dk, k_rope)
    results = (_rounded(x, dtype).astype(np.float64) for x in (first_q, first_k, dv))
    last = (None if x is None else _rounded(x, dtype).astype(np.float64) for x in (last_q, last_k))
    return *results, *last  # type: ignore[return-value]


def _apart(whole: Array, rope: npt.ArrayLike | None) -> tuple[Array, Array | None]:
    """The first columns and the last ones, in the shape of these; summed over heads where all share them."""
    if rope is None:
        return whole, None
    shape = np.shape(rope)
    first, last = np.split(whole, [whole.shape[2] - shape[-1]], axis=2)
    shared = len(shape) == 2 or shape[1] == 1
    return first, (last.sum(axis=1) if shared else last).reshape(shape)


def _rounded(x: Array, dtype: str | None) -> Array:
    return x if dtype is None else round_to(x, dtype)
