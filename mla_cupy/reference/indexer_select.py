"""The indexer's selection: the specification of `mla_cupy.indexer_select` and `mla_cupy.indexer_select_paged`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import without_heads
from mla_cupy.reference.indexer_logits import indexer_logits, indexer_logits_paged
from mla_cupy.reference.indexer_topk import indexer_topk

Array = npt.NDArray[Any]

_ROWS = 256
"""Queries processed at once."""


def indexer_select(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    weights: npt.ArrayLike,
    ks: npt.ArrayLike | None = None,
    ke: npt.ArrayLike | None = None,
    *,
    k_scale: npt.ArrayLike | None = None,
    accumulate: str = "float32",
    topk: int = 2048,
    order: str = "index",
    relative: bool = True,
    keep_first: int = 0,
    keep_last: int = 0,
) -> tuple[Array, Array]:
    """Select each query's keys: `indexer_topk` of `indexer_logits`, rounded to float32.

    Returns
    -------
    indices : array, (s_q, topk), int32
    counts : array, (s_q,), int32
    """
    q, weights = np.asarray(q), np.asarray(weights)
    indices, counts = np.empty((len(q), topk), np.int32), np.empty(len(q), np.int32)
    for begin in range(0, len(q), _ROWS):
        part = slice(begin, begin + _ROWS)
        first, end = (None if x is None else np.asarray(x)[part] for x in (ks, ke))
        logits = indexer_logits(q[part], k, weights[part], first, end, k_scale=k_scale, accumulate=accumulate)
        chosen: dict[str, Any] = {"order": order, "relative": relative}
        chosen |= {"keep_first": keep_first, "keep_last": keep_last, "return_values": False}
        indices[part], counts[part], _ = indexer_topk(_float32(logits), first, end, k=topk, **chosen)
    return indices, counts


def indexer_select_paged(
    q: npt.ArrayLike,
    cache: npt.ArrayLike,
    weights: npt.ArrayLike,
    seqlens: npt.ArrayLike,
    block_table: npt.ArrayLike,
    *,
    topk: int = 2048,
    slots: bool = True,
    order: str = "index",
    keep_first: int = 0,
    keep_last: int = 0,
) -> tuple[Array, Array]:
    """Select the cached keys of the next tokens: `indexer_topk` of `indexer_logits_paged`, rounded to float32.

    Returns
    -------
    indices : array, (b, s_q, topk), int32
        Places in the cache, or else positions.
    counts : array, (b, s_q), int32
    """
    q, weights, seqlens, table = (np.asarray(x) for x in (q, weights, seqlens, block_table))
    b, s_q = q.shape[:2]
    indices, counts = np.empty((b, s_q, topk), np.int32), np.empty((b, s_q), np.int32)
    chosen: dict[str, Any] = {"order": order, "keep_first": keep_first, "keep_last": keep_last, "return_values": False}
    for n in range(b if s_q else 0):
        part = slice(n, n + 1)
        logits = indexer_logits_paged(q[part], cache, weights[part], seqlens[part], table[part])
        places = {"block_table": table[part], "page_size": without_heads(np.asarray(cache)).shape[1]} if slots else {}
        ends = seqlens[part].reshape(-1)
        indices[n], counts[n], _ = indexer_topk(_float32(logits[0]), ke=ends, k=topk, **places, **chosen)
    return indices, counts


def _float32(logits: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return logits.astype(np.float32)
