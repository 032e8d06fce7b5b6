"""Dense attention with keys and values per head: the specification of `mla_cupy.mla_prefill`, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.attend import attend_values
from mla_cupy.reference.fp8_queries import dequantised

Array = npt.NDArray[Any]

#: Keys of a block; its e4m3 weights share one maximum.
FP8_BLOCK_KEYS = 128


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def mla_prefill(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    q_rope: npt.ArrayLike | None = None,
    k_rope: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    state_out: npt.ArrayLike | None = None,
    state_lse: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    q_scales: npt.ArrayLike | None = None,
    k_scales: npt.ArrayLike | None = None,
    v_scales: npt.ArrayLike | None = None,
    causal: bool = True,
    scale: float | None = None,
    out_dtype: str | None = None,
    rounding: str | None = None,
) -> tuple[Array, Array]:
    """Attend from the queries of each sequence to its keys, un-absorbed.

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g], with g the KV head of h.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk)
        Queries; float8_e4m3fn or uint8 are e4m3 codes, and so are keys and values then. Without their last columns, if
        these are in `q_rope`.
    k : array, (s_kv, h_kv, d_qk)
        Keys; without their last columns, if these are in `k_rope`.
    v : array, (s_kv, h_kv, d_v)
        Values.
    q_rope : array, (s_q, h_q, d_rope), optional
        Last columns of the queries.
    k_rope : array, (s_kv, d_rope), (s_kv, 1, d_rope) or (s_kv, h_kv, d_rope), optional
        Last columns of the keys: shared by all heads, or per KV head.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), integers, optional
        Where the sequences begin, and where the last one ends. Default: one sequence. Numbers are clamped to
        [0, s_q] or [0, s_kv], and one below its predecessor is raised to it.
    state_out, state_lse : arrays, (s_q, h_q, d_v) and (s_q, h_q), optional
        The attention of the same queries to other keys. The result is the attention to all keys. A `state_lse` of
        either infinity says that there were none.
    mask : array, (s_q, mask_bytes), uint8, optional
        Bit j % 8 of byte j // 8 says whether a query sees key j of its sequence; keys beyond are hidden.
    q_scales, k_scales, v_scales : array, (b, h_kv), optional
        What the queries, keys and values of a sequence and KV head are multiplied by. Default: 1.
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence.
    scale : float, optional
        Factor of the scores, d_qk**-0.5 by default.
    out_dtype : str, optional
        Dtype to which the rounding mode rounds `out`; default: the dtype of `q`, or bfloat16 for e4m3 codes.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: see `mla_decode`. Of e4m3 codes the weights are rounded to
        e4m3, whatever the name, the largest of each 128 keys, counted from the sequence's first, being 2^8.

    Returns
    -------
    out : array, (s_q, h_q, d_v), float64
        0 for a query without a key.
    lse : array, (s_q, h_q), float64
        log(sum_j exp(scale * q . k[j])); -inf for a query without a key.

    Notes
    -----
    NaN or infinity in a key or value that a query does not see has no effect on the query.
    """
    coded = np.asarray(q).dtype.name in BYTE_DTYPES
    exact = np.float64 if rounding is None or coded else np.float32
    queries, keys, values = (_numbers(x, coded).astype(exact) for x in (joined(q, q_rope), joined(k, k_rope), v))
    weights = "float8_e4m3fn" if rounding is not None and coded else rounding
    s_q, h_q, d_qk = queries.shape
    group = h_q // keys.shape[1]
    scale = d_qk**-0.5 if scale is None else scale

    out, lse = np.zeros((s_q, h_q, values.shape[2])), np.full((s_q, h_q), -np.inf)
    for row in seen_keys(s_q, len(keys), cu_seqlens_q, cu_seqlens_kv, causal):
        among = row.keys(mask)
        scores_by = _scales_of((q_scales, k_scales), row.sequence, keys.shape[1])
        values_by = _scales_of((v_scales,), row.sequence, keys.shape[1])
        for h in range(h_q):
            seen, factor = (among, h // group), scale * scores_by[h // group]
            attended = attend_values(
                queries[row.query, None, h], keys[seen], values[seen], factor, weights, FP8_BLOCK_KEYS
            )
            out[row.query, h], lse[row.query, h] = attended.out[0] * values_by[h // group], attended.lse[0]
    if state_lse is not None:
        out, lse = _merged(out, lse, np.asarray(state_out), np.asarray(state_lse))
    default = "bfloat16" if coded else dtype_name(np.asarray(q).dtype)
    return (out if rounding is None else round_to(out, out_dtype or default)), lse


def prefill_mask(
    indices: npt.ArrayLike,
    max_keys: int,
    *,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_kv: npt.ArrayLike | None = None,
    relative: bool = False,
) -> tuple[Array]:
    """Mask of the keys of its sequence that each query selects, one bit each.

    Parameters
    ----------
    indices : array, (s_q, topk), integers
        Entries that are no key of the query's sequence, or have no bit, are skipped.
    max_keys : int
        The most keys of a sequence.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), integers, optional
        As for `mla_prefill`.
    relative : bool
        True if indices count from the first key of the query's sequence, False if from the first of all keys.

    Returns
    -------
    mask : array, (s_q, mask_bytes), uint8
        Bit j % 8 of byte j // 8 is key j; mask_bytes is 16 for every 128 keys.
    """
    indices = np.asarray(indices).astype(np.int64)
    indices = indices.reshape(len(indices), -1) if indices.size else np.zeros((len(indices), 0), np.int64)
    bits = np.zeros((len(indices), -(-max_keys // 128) * 128), bool)
    one_sequence = cu_seqlens_kv is None
    s_kv = bits.shape[1] if one_sequence else np.iinfo(np.int32).max
    for row in seen_keys(len(indices), s_kv, cu_seqlens_q, cu_seqlens_kv, causal=False):
        keys = indices[row.query] - (0 if relative else row.begin)
        selected = (indices[row.query] >= 0) & (keys >= 0) & (keys < min(row.end - row.begin, bits.shape[1]))
        bits[row.query, keys[selected]] = True
    return (np.packbits(bits, axis=1, bitorder="little"),)


class SeenKeys(NamedTuple):
    """The keys that a query sees: from `begin` up to `end`; and its sequence."""

    query: int
    begin: int
    end: int
    sequence: int

    def keys(self, mask: npt.ArrayLike | None) -> slice | Array:
        """Keys that its row of a mask leaves."""
        if mask is None:
            return slice(self.begin, self.end)
        bits = np.unpackbits(np.asarray(mask)[self.query], count=self.end - self.begin, bitorder="little")
        return self.begin + np.flatnonzero(bits)


def seen_keys(
    s_q: int, s_kv: int, cu_seqlens_q: npt.ArrayLike | None, cu_seqlens_kv: npt.ArrayLike | None, causal: bool
) -> Iterator[SeenKeys]:
    """Keys that each query of a sequence sees; queries outside all sequences are left out."""
    starts_q, starts_kv = _starts(cu_seqlens_q, s_q), _starts(cu_seqlens_kv, s_kv)
    for n in range(len(starts_q) - 1):
        begin, end = int(starts_kv[n]), int(starts_kv[n + 1])
        for query in range(starts_q[n], starts_q[n + 1]):
            after = int(starts_q[n + 1]) - 1 - query
            yield SeenKeys(query, begin, max(begin, end - after) if causal else end, n)


def _starts(cu_seqlens: npt.ArrayLike | None, total: int) -> Array:
    """Starts and ends of sequences, clamped, in order."""
    if cu_seqlens is None:
        return np.array([0, total])
    return np.maximum.accumulate(np.clip(np.asarray(cu_seqlens).astype(np.int64), 0, total))


def joined(x: npt.ArrayLike, rope: npt.ArrayLike | None) -> Array:
    """Whole rows per head."""
    x = np.asarray(x)
    if rope is None:
        return x
    rope = np.asarray(rope)
    rope = rope if rope.ndim == 3 else rope[:, None]
    return np.concatenate([x, np.broadcast_to(rope, (*x.shape[:2], rope.shape[2]))], axis=2)


def _numbers(x: npt.ArrayLike, coded: bool) -> Array:
    """The numbers of an array, which may be e4m3 codes."""
    return dequantised(x) if coded else np.asarray(x)


def _scales_of(scales: Iterable[npt.ArrayLike | None], sequence: int, heads: int) -> Array:
    """The product of scales, for each KV head of a sequence."""
    product = np.ones(heads)
    for given in scales:
        if given is not None:
            product = product * np.asarray(given, np.float64)[sequence]
    return product


def _merged(out: Array, lse: Array, state_out: Array, state_lse: Array) -> tuple[Array, Array]:
    """The attention to two disjoint sets of keys."""
    state_lse = np.where(np.isinf(state_lse), -np.inf, state_lse.astype(np.float64))
    top = np.maximum(lse, state_lse)
    top = np.where(top == -np.inf, 0.0, top)
    weights = np.exp(np.stack([lse, state_lse]) - top)
    total = weights.sum(axis=0)
    parts = np.stack([out, state_out.astype(np.float64)])
    both = np.where(weights[..., None] == 0, 0.0, weights[..., None] * parts).sum(axis=0)
    return np.where(total[..., None] == 0, 0.0, both / total[..., None]), top + np.log(total)
