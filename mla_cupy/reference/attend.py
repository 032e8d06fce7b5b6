"""Attention of some rows to all of some keys: what dense and sparse attention have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import round_to

Array = npt.NDArray[Any]

#: The rounding mode keeps its running maximum over blocks of this many tokens, as the kernels do.
BLOCK_TOKENS = 64


class Attended(NamedTuple):
    """Results of `attend`: out (rows, d_v), natural lse (rows,), and the largest score, times scale (rows,)."""

    out: Array
    lse: Array
    top: Array


def attend(rows: Array, keys: Array, d_v: int, scale: float, rounding: str | None) -> Attended:
    """Attention of `rows` (rows, d_qk) to `keys` (n, d_qk), whose values are their first `d_v` elements."""
    return attend_values(rows, keys, keys[:, :d_v], scale, rounding)


def attend_values(rows: Array, keys: Array, values: Array, scale: float, rounding: str | None) -> Attended:
    """Attention of `rows` (rows, d_qk) to `keys` (n, d_qk) with `values` (n, d_v)."""
    if rounding is not None:
        return _attend_rounded(rows, keys, values, scale, rounding)
    if len(keys) == 0:
        nothing = np.full(len(rows), -np.inf)
        return Attended(np.zeros((len(rows), values.shape[1])), nothing, nothing)
    scores = scale * (rows @ keys.T)
    top = scores.max(axis=1)
    weights = np.exp(scores - _shift(top)[:, None])
    total = weights.sum(axis=1)
    return Attended(_normalise(weights @ values, total), _shift(top) + np.log(total), top)


def _attend_rounded(rows: Array, keys: Array, values: Array, scale: float, rounding: str) -> Attended:
    """Attention in the kernels' arithmetic: float32, online softmax in base 2, rounded weights."""
    rows, keys, values = (x.astype(np.float32) for x in (rows, keys, values))
    scale_log2 = np.float32(scale * np.log2(np.e))
    top = np.full(len(rows), -np.inf, np.float32)
    total = np.zeros(len(rows), np.float32)
    out: Array = np.zeros((len(rows), values.shape[1]), np.float32)
    for start in range(0, len(keys), BLOCK_TOKENS):
        block = keys[start : start + BLOCK_TOKENS]
        scores = (rows @ block.T) * scale_log2
        new_top = np.maximum(top, scores.max(axis=1))
        shift = _shift(new_top)
        weights = np.exp2(scores - shift[:, None])
        decay = np.exp2(top - shift)
        total = total * decay + weights.sum(axis=1)
        out = out * decay[:, None] + round_to(weights, rounding) @ values[start : start + BLOCK_TOKENS]
        top = new_top
    ln2 = np.float32(np.log(2.0))
    return Attended(_normalise(out, total), (_shift(top) + np.log2(total)) * ln2, top * ln2)


def _shift(top: Array) -> Array:
    """Shift of scores with this maximum: not -inf, so that keys without weight give exp(-inf), not NaN."""
    return np.where(top == -np.inf, top.dtype.type(0), top)


def _normalise(out: Array, total: Array) -> Array:
    """`out` divided by the sum of its weights; 0 where that sum is 0."""
    return np.where(total[:, None] == 0, out.dtype.type(0), out / total[:, None])
