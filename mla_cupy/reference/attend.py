"""Attention of some rows to all of some keys, for dense and sparse attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.dtypes import round_to

Array = npt.NDArray[Any]

#: The rounding mode keeps its running maximum over blocks of this many tokens, as the kernels do, and lets it follow
#: only a score that is so much larger: a weight above 1 is rounded where 1 itself would not be.
BLOCK_TOKENS = 64
LAZY_MAX_LOG2 = np.float32(8.0)


#: Rounds weights to sums of two e4m3 numbers: of the float16 value, and of the remainder.
E4M3_PAIRS = "float8_e4m3fn x 2"

#: Columns of a score that the tensor cores sum, for products of e4m3 numbers.
_FP8_SUM_COLUMNS = 192


class Attended(NamedTuple):
    """Results of `attend`: out (rows, d_v), natural lse (rows,), and the largest score, times scale (rows,)."""

    out: Array
    lse: Array
    top: Array


def attend(rows: Array, keys: Array, d_v: int, scale: float, rounding: str | None) -> Attended:
    """Attention of `rows` (rows, d_qk) to `keys` (n, d_qk); values are the keys' first `d_v` elements."""
    return attend_values(rows, keys, keys[:, :d_v], scale, rounding)


def attend_values(
    rows: Array, keys: Array, values: Array, scale: float, rounding: str | None, fp8_block: int = BLOCK_TOKENS
) -> Attended:
    """Attention of `rows` (rows, d_qk) to `keys` (n, d_qk) with `values` (n, d_v).

    Weights in e4m3 have a maximum for each `fp8_block` keys.
    """
    if rounding in ("float8_e4m3fn", E4M3_PAIRS):
        return _attend_fp8(rows, keys, values, scale, fp8_block, pairs=rounding == E4M3_PAIRS)
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
    top = largest = np.full(len(rows), -np.inf, np.float32)
    total = np.zeros(len(rows), np.float32)
    out: Array = np.zeros((len(rows), values.shape[1]), np.float32)
    for start in range(0, len(keys), BLOCK_TOKENS):
        block = keys[start : start + BLOCK_TOKENS]
        scores = (rows @ block.T) * scale_log2
        of_block = scores.max(axis=1)
        new_top = np.where(of_block > top + LAZY_MAX_LOG2, of_block, top)
        shift = _shift(new_top)
        weights = np.exp2(scores - shift[:, None])
        decay = np.exp2(top - shift)
        total = total * decay + weights.sum(axis=1)
        out = out * decay[:, None] + round_to(weights, rounding) @ values[start : start + BLOCK_TOKENS]
        top, largest = new_top, np.maximum(largest, of_block)
    ln2 = np.float32(np.log(2.0))
    return Attended(_normalise(out, total), (_shift(top) + np.log2(total)) * ln2, largest * ln2)


def _attend_fp8(rows: Array, keys: Array, values: Array, scale: float, block_tokens: int, pairs: bool) -> Attended:
    """Attention with weights in e4m3, or `pairs` of it; the largest of each `block_tokens` is 2^8.

    `out` is divided by the sum of the rounded weights; the log-sum-exp is of the weights before that.
    """
    scores = scale * np.log2(np.e) * _fp8_products(rows, keys)
    top = scores.max(axis=1, initial=-np.inf)
    sums, out = np.zeros((2, len(rows))), np.zeros((len(rows), values.shape[1]))
    for start in range(0, len(keys), block_tokens):
        block = scores[:, start : start + block_tokens]
        largest = _shift(block.max(axis=1))
        weights = np.exp2(block - largest[:, None] + 8)
        kept = two_terms(weights) if pairs else round_to(weights, "float8_e4m3fn")
        factor = np.exp2(largest - _shift(top) - 8)
        sums += [weights.sum(axis=1) * factor, kept.sum(axis=1) * factor]
        out += kept @ values[start : start + block_tokens] * factor[:, None]
    return Attended(_normalise(out, sums[1]), (_shift(top) + np.log2(sums[0])) * np.log(2.0), top * np.log(2.0))


def two_terms(weights: Array) -> Array:
    """The numbers of two e4m3 terms: of the float16 weights, and of the remainder after the first."""
    halves = round_to(weights, "float16")
    first = round_to(halves, "float8_e4m3fn")
    both: Array = first + round_to(halves - first, "float8_e4m3fn")
    return both


def _fp8_products(rows: Array, keys: Array) -> Array:
    """rows @ keys.T in sums of 192 columns, as tensor cores sum products of e4m3 numbers.

    Sums of 32 terms and the previous sum: bits more than 13 below the largest one are cut off, in the terms and in the
    sum. A product counts with the magnitude of its factors without their fractions.
    """
    total = np.zeros((len(rows), len(keys)))
    for of_sum in np.arange(rows.shape[1]).reshape(-1, _FP8_SUM_COLUMNS):
        sums = np.zeros_like(total)
        for columns in of_sum.reshape(-1, 32):
            a, b = rows[:, None, columns], keys[None, :, columns]
            for start in range(0, len(keys), BLOCK_TOKENS):
                part = slice(start, start + BLOCK_TOKENS)
                largest = (_magnitude(a) * _magnitude(b[:, part])).max(axis=2)
                unit = np.maximum(largest, _magnitude(sums[:, part])) * 2.0**-13
                terms = np.trunc(a * b[:, part] / unit[..., None]).sum(axis=2) + np.trunc(sums[:, part] / unit)
                terms *= unit
                unit = _magnitude(terms) * 2.0**-13
                sums[:, part] = np.trunc(terms / unit) * unit
        total += sums
    return total


def _magnitude(x: Array) -> Array:
    """The powers of two below numbers; of 0 next to nothing."""
    return np.where(x == 0, 2.0**-500, np.ldexp(0.5, np.frexp(x)[1]))


def _shift(top: Array) -> Array:
    """Shift of scores with this maximum: never -inf, so that keys without weight give exp(-inf), not NaN."""
    return np.where(top == -np.inf, top.dtype.type(0), top)


def _normalise(out: Array, total: Array) -> Array:
    """`out` divided by the sum of its weights; 0 where that sum is 0."""
    return np.where(total[:, None] == 0, out.dtype.type(0), out / total[:, None])
