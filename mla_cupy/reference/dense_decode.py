"""Decode attention over a paged latent cache: the specification of `mla_cupy.mla_decode`, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.errors import ShapeError, explain
from mla_cupy.reference.attend import attend
from mla_cupy.reference.cache import cache_gather
from mla_cupy.reference.fp8_queries import dequantised
from mla_cupy.reference.lse import log_of_base

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def mla_decode(
    q: npt.ArrayLike,
    kv_cache: npt.ArrayLike,
    block_table: npt.ArrayLike,
    seqlens: npt.ArrayLike,
    *,
    tree_mask: npt.ArrayLike | None = None,
    d_v: int = 512,
    scale: float | None = None,
    causal: bool = True,
    cp_world: int = 1,
    cp_rank: int = 0,
    kv_scale: float = 1.0,
    q_scale: float = 1.0,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -np.inf,
    rounding: str | None = None,
) -> tuple[Array, Array]:
    """Attend from a few query tokens per sequence to a paged latent cache.

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :d_v], where j runs over the visible tokens: those
    below the sequence's length and, if causal, with j <= i + length - s_q; or those of the mask.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk)
        Absorbed queries: d_qk is 576 in DeepSeek-V3. float8_e4m3fn or uint8 are e4m3 codes.
    kv_cache : array, (num_pages, page_size, h_kv, d_qk) or (num_pages, page_size, d_qk)
        The pool of pages. The values are the first `d_v` elements of the keys. Query head h reads head
        h // (h_q // h_kv). Or the pages of an FP8 record, "v32", "v4" or "fp8": see `cache_append`.
    block_table : array, (b, max_pages), integers
        The pages of each sequence. Entries past its end are not read. A page outside [0, num_pages) is missing: its
        tokens are invisible.
    seqlens : array, (b,), integers
        Tokens in the cache of each sequence, the query tokens included; clamped to
        [0, max_pages * page_size * cp_world + cp_rank].
    tree_mask : array, (b, s_q), 64-bit integers, optional
        In place of `causal`: query token i sees the tokens before the last s_q of the sequence, and token
        length - s_q + j iff bit j of its entry is set.
    d_v : int
        Width of the values.
    scale : float, optional
        Factor of the scores, d_qk**-0.5 by default.
    causal : bool
        Hide from each query token the query tokens after it, which are the last of the cache.
    cp_world, cp_rank : int
        Token j of the cache is token j * cp_world + cp_rank of the sequence; `seqlens`, and i + length - s_q, count the
        tokens of the whole sequence.
    kv_scale : float
        Scale of the record "fp8".
    q_scale : float
        Scale of queries in e4m3.
    math : str
        "exact", or "fp8": queries that are no e4m3 codes as `quantise_queries` leaves them.
    lse_base : str
        "e" or "2".
    empty_lse : float
        The `lse` of a row that sees no token.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: float32 scores and sums, weights rounded to that format
        against the running maximum, and `out` to the dtype of `q`, or of e4m3 codes to bfloat16; of records the keys,
        too. The difference from the exact result is the error that a correct kernel may have. With math="fp8" weights
        are rounded to e4m3, whatever the name.

    Returns
    -------
    out : array, (b, s_q, h_q, d_v), float64
        0 in rows that see no token.
    lse : array, (b, h_q, s_q), float64
        log(sum_j exp(scale * q . k[j])).

    Notes
    -----
    NaN or infinity in a token that a query does not see has no effect on the query.
    """
    q, cache, block_table, seqlens = map(np.asarray, (q, kv_cache, block_table, seqlens))
    is_record = str(cache.dtype) in BYTE_DTYPES
    if cache.ndim == 3:
        cache = cache[:, :, None, :]
    b, s_q, h_q, d_qk = q.shape
    h_kv = cache.shape[2]
    if h_q % h_kv:
        raise ShapeError(explain("q", f"{h_q} heads", f"a multiple of the cache's {h_kv}"))
    group = h_q // h_kv
    scale = d_qk**-0.5 if scale is None else scale
    coded = str(q.dtype) in BYTE_DTYPES
    queries = dequantised(q) if math == "fp8" or coded else q
    scale *= q_scale
    weights, factor = rounding, 1.0
    if math == "fp8" and rounding is not None:  # the kernel multiplies the numbers as they are stored
        weights, factor, kv_scale, scale = "float8_e4m3fn", kv_scale, 1.0, scale * kv_scale

    out = np.zeros((b, s_q, h_q, d_v))
    lse = np.full((b, h_q, s_q), -np.inf)
    for i in range(b):
        length = int(np.clip(seqlens[i], 0, block_table.shape[1] * cache.shape[1] * cp_world + cp_rank))
        keys, here = _present_tokens(cache, block_table[i], len(range(cp_rank, length, cp_world)), kv_scale)
        if is_record and rounding is not None:
            keys = round_to(keys, rounding)
        positions = here * cp_world + cp_rank
        words = None if tree_mask is None else np.asarray(tree_mask)[i].astype(np.uint64)
        for tokens, visible in _visible(positions, length, s_q, causal, words):
            for h in range(h_kv):
                heads = slice(h * group, (h + 1) * group)
                rows = queries[i, tokens, heads].astype(keys.dtype)
                row_out, row_lse, _ = attend(rows.reshape(-1, d_qk), keys[visible, h], d_v, scale, weights)
                out[i, tokens, heads] = factor * row_out.reshape(*rows.shape[:2], d_v)
                lse[i, heads, tokens] = row_lse.reshape(rows.shape[:2]).T
    if rounding is not None:
        out = round_to(out, "bfloat16" if coded else dtype_name(q.dtype))
    return out, np.where(lse == -np.inf, empty_lse, lse / log_of_base(lse_base))


def cascade_decode(
    q: npt.ArrayLike,
    kv_cache: npt.ArrayLike,
    block_table: npt.ArrayLike,
    seqlens: npt.ArrayLike,
    *,
    groups: Sequence[tuple[int, int, int]],
    scale: float | None = None,
    causal: bool = True,
    q_scale: float = 1.0,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -np.inf,
) -> tuple[Array, Array]:
    """Attend as `mla_decode` does, where a group's sequences have the first pages of its first one.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, scale, causal, q_scale, math, lse_base, empty_lse
        As for `mla_decode`.
    groups : sequence of (int, int, int)
        First sequence, number of sequences, and pages that they share.
    """
    table = np.array(block_table)
    for first, count, pages in groups:
        table[first : first + count, :pages] = table[first, :pages]
    numbers: dict[str, Any] = {"scale": scale, "causal": causal, "lse_base": lse_base, "empty_lse": empty_lse}
    return mla_decode(q, kv_cache, table, seqlens, q_scale=q_scale, math=math, **numbers)


def _present_tokens(cache: Array, table: Array, length: int, kv_scale: float) -> tuple[Array, Array]:
    """The keys of one sequence without those in missing pages, (n, h_kv, d_qk), and their positions, (n,)."""
    page_size = cache.shape[1]
    positions = np.arange(length)
    pages = table[: -(-length // page_size)].astype(np.int64)[positions // page_size]
    present = (pages >= 0) & (pages < cache.shape[0])
    positions = positions[present]
    if str(cache.dtype) in BYTE_DTYPES:
        rows = cache_gather(cache, pages[present] * page_size + positions % page_size, kv_scale=kv_scale)[0]
        return rows[:, None].astype(np.float64), positions
    return cache[pages[present], positions % page_size].astype(np.float64), positions


def _visible(
    positions: Array, length: int, s_q: int, causal: bool, words: Array | None
) -> Iterator[tuple[slice, slice | Array]]:
    """Groups of query tokens, and which of the present keys each group sees; `words` are those of a tree's mask."""
    if not causal:
        yield slice(0, s_q), slice(None)
        return
    drafts = positions - (length - s_q)
    for i in range(s_q):
        if words is None:
            yield slice(i, i + 1), slice(int(np.searchsorted(drafts, i, side="right")))
        else:
            bits = words[i] >> np.maximum(drafts, 0).astype(np.uint64)
            yield slice(i, i + 1), (drafts < 0) | ((bits & np.uint64(1)) == 1)
