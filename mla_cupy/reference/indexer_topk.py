"""Exact top-k under one total order: the specification of `mla_cupy.indexer_topk`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.reference.indexer_logits import key_ranges

Array = npt.NDArray[Any]


def indexer_topk(
    logits: npt.ArrayLike,
    ks: npt.ArrayLike | None = None,
    ke: npt.ArrayLike | None = None,
    block_table: npt.ArrayLike | None = None,
    *,
    k: int = 2048,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
) -> tuple[Array, Array, Array | None]:
    """Select the k largest logits of each row.

    Larger logits come first; of equal ones the lower index does. -0 equals +0, and NaN is below -inf. So the result is
    a function of the logits alone, to the last bit.

    Parameters
    ----------
    logits : array, (s_q, s_kv), float32
    ks, ke : array, (s_q,), integers, optional
        Row t selects among ks[t] <= s < ke[t], both clamped to [0, s_kv]. Default: all. If ke has b numbers,
        each belongs to the last of a sequence's s_q / b rows; each row before it sees one key less.
    block_table : array, (b, max_pages), integers, optional
        The pages of each sequence, which has s_q / b rows: an index s becomes block_table[., s // page_size] *
        page_size + s % page_size, or -1 past the end of the table and where that is no int32 from 0 on.
    k : int
        Number of keys, unless the range has fewer.
    order : str
        "index": ascending; "value": from the first to the last in the order above.
    relative : bool
        Whether indices count from ks[t].
    page_size : int
    keep_first, keep_last : int
        Number of keys at the beginning and at the end of a range that come before all others.
    return_values : bool

    Returns
    -------
    indices : array, (s_q, k), int64
        -1 in what is left.
    counts : array, (s_q,), int64
        min(k, keys in the range).
    values : array, (s_q, k), float64, or None
        The logits at the indices; -inf in what is left.
    """
    logits = np.asarray(logits)
    s_q, s_kv = logits.shape
    first, end = key_ranges(s_q, s_kv, ks, None if ke is None else _ends(ke, s_q))
    indices, counts = np.full((s_q, k), -1, np.int64), np.zeros(s_q, np.int64)
    values = np.full((s_q, k), -np.inf)
    for t, (a, b) in enumerate(zip(first, end, strict=True)):
        chosen = _select(logits[t, a:b], k, order, keep_first, keep_last) + a
        counts[t] = n = len(chosen)
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            values[t, :n] = logits[t, chosen]
        if block_table is not None:
            table = np.asarray(block_table).astype(np.int64)
            chosen = _in_pages(chosen, table[t * len(table) // s_q], page_size)
        indices[t, :n] = chosen - a if relative else chosen
    return indices, counts, values if return_values else None


def order_keys(values: Array) -> npt.NDArray[np.uint32]:
    """float32 as unsigned integers in the order of the selection: NaN lowest, -0 equal to +0."""
    values = np.asarray(values).astype(np.float32)
    bits = np.where(values == 0, np.float32(0), values).view(np.uint32)
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))
    return np.where(np.isnan(values), 0, keys).astype(np.uint32)


def _ends(ke: npt.ArrayLike, s_q: int) -> npt.NDArray[np.int64]:
    """Ends of all rows."""
    given = np.asarray(ke).astype(np.int64)
    rows = s_q // max(1, len(given))
    return (given[:, None] - np.arange(rows)[::-1]).reshape(-1)


def _select(values: Array, k: int, order: str, keep_first: int, keep_last: int) -> npt.NDArray[np.int64]:
    """The places of the k first ones of a range."""
    keys = order_keys(values).astype(np.int64)
    places = np.arange(len(values))
    keys[(places < keep_first) | (places >= len(values) - keep_last)] = 1 << 32
    chosen = np.lexsort((places, -keys))[:k]
    return np.sort(chosen) if order == "index" else chosen


def _in_pages(chosen: Array, table: Array, page_size: int) -> Array:
    pages = chosen // page_size
    there = pages < len(table)
    slots = np.full(len(chosen), -1, np.int64)
    slots[there] = table[pages[there]] * page_size + chosen[there] % page_size
    return np.where((slots >= 0) & (slots < 2**31), slots, -1)
