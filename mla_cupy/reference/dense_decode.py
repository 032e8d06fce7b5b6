"""Decode attention over a paged latent cache: the specification of `mla_cupy.mla_decode`, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import BYTE_DTYPES, without_heads
from mla_cupy.dtypes import dtype_name, round_to
from mla_cupy.reference.attend import E4M3_PAIRS, attend
from mla_cupy.reference.cache import cache_gather, key_format
from mla_cupy.reference.fp8_queries import dequantised
from mla_cupy.reference.fp8_results import with_fp8
from mla_cupy.reference.lse import log_of_base
from mla_cupy.reference.projection import projected
from mla_cupy.shapes import D_V, VALUE_WIDTHS

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def mla_decode(
    q: npt.ArrayLike,
    kv_cache: npt.ArrayLike,
    block_table: npt.ArrayLike,
    seqlens: npt.ArrayLike,
    *,
    q_rope: npt.ArrayLike | None = None,
    cu_seqlens_q: npt.ArrayLike | None = None,
    tree_mask: npt.ArrayLike | None = None,
    w_uv: npt.ArrayLike | None = None,
    gate: npt.ArrayLike | None = None,
    attn_sink: npt.ArrayLike | None = None,
    out_cos: npt.ArrayLike | None = None,
    out_sin: npt.ArrayLike | None = None,
    out_positions: npt.ArrayLike | None = None,
    q_scales: npt.ArrayLike | None = None,
    kv_scales: npt.ArrayLike | None = None,
    d_v: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    kv_scale: float = 1.0,
    kv_format: str | None = None,
    q_scale: float = 1.0,
    math: str = "exact",
    lse_base: str = "e",
    empty_lse: float = -np.inf,
    out_dtype: Any = None,
    scales: str = "plain",
    rounding: str | None = None,
) -> tuple[Array, ...]:
    """Attend from a few query tokens per sequence to a paged latent cache.

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j]) * k[j, :d_v], where j runs over the visible tokens: those
    below the sequence's length and, if causal, with j <= i + length - s_q; or in the mask. With a sink, `out` is
    multiplied by 1 / (1 + exp(attn_sink[h] - lse)).

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk)
        Absorbed queries: d_qk is 576 in DeepSeek-V3. float8_e4m3fn or uint8 are e4m3 codes. (total_q, h_q, d_qk) with
        `cu_seqlens_q`.
    kv_cache : array, (num_pages, page_size, d_qk)
        The pool of pages, which all query heads read; an axis of size 1 may stand on either side of the tokens. The
        values are the first `d_v` elements of the keys. Or the pages of an FP8 record, "v32", "v32-nope" for a
        d_qk of 512, "v4", "v41" or "fp8": see `cache_append`.
    block_table : array, (b, max_pages), integers
        The pages of each sequence. Entries past its end are not read. A page outside [0, num_pages) is missing: its
        tokens are invisible.
    seqlens : array, (b,), integers
        Tokens in the cache of each sequence, the query tokens included; clamped to
        [0, max_pages * page_size * cp_world + cp_rank].
    q_rope : array, (b, s_q, h_q, d_rope), optional
        Further columns of the queries; (total_q, h_q, d_rope) with `cu_seqlens_q`.
    cu_seqlens_q : array, (b + 1,), integers, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1], which are its last tokens. Clamped to
        [0, total_q]; one below its predecessor is raised to it. A query of no sequence sees no token.
    tree_mask : array, (b, s_q), 64-bit integers, optional
        In place of `causal`: query token i sees the tokens before the last s_q of the sequence, and token
        length - s_q + j iff bit j of its entry is set.
    w_uv : array, (h_q, d_head, d_v), optional
        What results are multiplied by, see `projected`.
    gate : array, (b, s_q, h_q, d_head), optional
        Its sigmoid is a factor of what `w_uv` gives.
    attn_sink : array, (h_q,), optional
        Logits of a key without a value, which `lse` leaves out.
    out_cos, out_sin : array, (max_position, 32), optional
        Turn the last 64 columns of `out` back: see `turned_back`.
    out_positions : array, (b, s_q), integers, optional
        The queries' rows of these; (total_q,) with `cu_seqlens_q`.
    q_scales : array, (b, s_q, h_q), optional
        Scales of the rows of queries in e4m3, beside `q_scale`.
    kv_scales : array, (1,), optional
        Scale of the record "fp8", beside `kv_scale`.
    d_v : int, optional
        Width of the values. Default: 256 for a d_qk of 320 or 288, else 512.
    scale : float, optional
        Factor of the scores, d_qk**-0.5 by default.
    causal : bool
        Hide from each query token the query tokens after it, which are the last of the cache.
    window : int, optional
        Hide all tokens except the last `window` up to the query's own: tokens with j <= i + length - s_q - window.
    max_seqlen_q : int, optional
        Means nothing here.
    cp_world, cp_rank : int
        Token j of the cache is token j * cp_world + cp_rank of the sequence; `seqlens`, and i + length - s_q, count the
        tokens of the whole sequence.
    kv_scale : float
        Scale of the record "fp8".
    kv_format : str, optional
        Name of the record, see `key_format`.
    q_scale : float
        Scale of queries in e4m3.
    math : str
        "exact"; or "fp8": queries that are no e4m3 codes as `quantise_queries` leaves them; or "fp8x2": the same as
        sums of two terms, see `quantise_query_terms`.
    lse_base : str
        "e" or "2".
    empty_lse : float
        The `lse` of a row that sees no token.
    out_dtype : str or dtype, optional
        "float8_e4m3fn" or "uint8" quantises `out`, rounded to 16 bits: see `quantise_results`. Others mean nothing.
    scales : str
        Rule of the scales of such results.
    rounding : str, optional
        "bfloat16" or "float16" rounds as the kernels do: float32 scores and sums, weights rounded to that format
        against the running maximum, and `out` to the dtype of `q`, or of e4m3 codes to bfloat16; of records the keys,
        too. The difference from the exact result is the error that a correct kernel may have. With math="fp8" weights
        are rounded to e4m3, whatever the name, and with "fp8x2" to two terms in it.

    Returns
    -------
    out : array, (b, s_q, h_q, d_v), or (b, s_q, h_q, d_head) with a `w_uv`, float64
        0 in rows that see no token. (total_q, h_q, d_v) with `cu_seqlens_q`.
    lse : array, (b, h_q, s_q), float64
        log(sum_j exp(scale * q . k[j])). (h_q, total_q) with `cu_seqlens_q`.
    out_scales : array, (b, s_q, h_q, d_v / 128), float64
        Only of FP8 results, whose `out` holds the e4m3 numbers that these multiply.

    Notes
    -----
    NaN or infinity in a token that a query does not see has no effect on the query.
    """
    q, cache, block_table, seqlens = map(np.asarray, (q, kv_cache, block_table, seqlens))
    cache = without_heads(cache, "kv_cache")
    coded = str(q.dtype) in BYTE_DTYPES
    if q_rope is not None:
        q = np.concatenate([q, np.asarray(q_rope)], axis=-1)
    packed = cu_seqlens_q is not None
    if packed:  # one sequence of queries, divided among the requests
        q = q[None]
    _, s_q, h_q, d_qk = q.shape
    b = len(block_table)
    record = key_format(cache, d_qk, kv_format)
    scale = d_qk**-0.5 if scale is None else scale
    d_v = VALUE_WIDTHS.get(d_qk, D_V) if d_v is None else d_v
    queries = q if math == "exact" and not coded else dequantised(q, terms=2 if math == "fp8x2" else 1)
    if q_scales is not None:
        queries = queries * np.asarray(q_scales, np.float64).reshape(q.shape[:3])[..., None]
    if kv_scales is not None:
        kv_scale *= float(np.asarray(kv_scales).reshape(()))
    scale *= q_scale
    weights, factor = rounding, 1.0
    if math != "exact" and rounding is not None:  # the kernel multiplies the numbers as they are stored
        weights = E4M3_PAIRS if math == "fp8x2" else "float8_e4m3fn"
        factor, kv_scale, scale = kv_scale, 1.0, scale * kv_scale

    out = np.zeros((*q.shape[:-1], d_v))
    lse = np.full((len(q), h_q, s_q), -np.inf)
    for i, (at, first, count) in enumerate(_places(cu_seqlens_q, b, s_q)):
        length = int(np.clip(seqlens[i], 0, block_table.shape[1] * cache.shape[1] * cp_world + cp_rank))
        keys, here = _present_tokens(cache, block_table[i], len(range(cp_rank, length, cp_world)), record, kv_scale)
        if record and rounding is not None:
            keys = round_to(keys, rounding)
        positions = here * cp_world + cp_rank
        words = None if tree_mask is None else np.asarray(tree_mask)[i].astype(np.uint64)
        for some, visible in _visible(positions, length, count, causal, words, window):
            tokens = slice(first + some.start, first + some.stop)
            rows = queries[at, tokens].astype(keys.dtype)
            row_out, row_lse, _ = attend(rows.reshape(-1, d_qk), keys[visible], d_v, scale, weights)
            out[at, tokens] = factor * row_out.reshape(*rows.shape[:2], d_v)
            lse[at, :, tokens] = row_lse.reshape(rows.shape[:2]).T
    if attn_sink is not None:
        sink = np.asarray(attn_sink, np.float64)[:, None]
        share = np.where(lse == -np.inf, 1.0, 1 / (1 + np.exp(sink - lse)))
        out *= share.swapaxes(1, 2)[..., None]
    if out_cos is not None:
        places = np.asarray(out_positions)
        out = turned_back(out, out_cos, out_sin, places[None] if packed else places)
    half = "bfloat16" if coded else dtype_name(q.dtype)
    if w_uv is not None:
        out = projected(out, w_uv, gate, half if rounding is not None else None)
    if rounding is not None:
        out = round_to(out, half)
    lse = np.where(lse == -np.inf, empty_lse, lse / log_of_base(lse_base))
    results = with_fp8(out, lse, half, out_dtype, scales)
    return tuple(x[0] for x in results) if packed else results


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def turned_back(out: Array, cos: npt.ArrayLike, sin: Any, positions: npt.ArrayLike) -> Array:
    """Undo RoPE in the last columns of results.

    Parameters
    ----------
    out : array, (b, s_q, h_q, d)
    cos, sin : array, (max_position, n)
        A pair (x, y) of neighbouring columns, of the last 2 n, becomes (x * cos + y * sin, y * cos - x * sin).
    positions : array, (b, s_q), integers
        Rows of cos and sin; clamped to them.
    """
    c, s = (np.asarray(table, np.float64) for table in (cos, sin))
    rows = np.clip(np.asarray(positions), 0, len(c) - 1)
    c, s = c[rows][:, :, None], s[rows][:, :, None]
    turned: Array = out.copy()
    first = out.shape[-1] - 2 * c.shape[-1]
    x, y = out[..., first::2], out[..., first + 1 :: 2]
    turned[..., first::2], turned[..., first + 1 :: 2] = x * c + y * s, y * c - x * s
    return turned


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
) -> tuple[Array, ...]:
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


def _present_tokens(
    cache: Array, table: Array, length: int, record: str | None, kv_scale: float
) -> tuple[Array, Array]:
    """The keys of one sequence without those in missing pages, (n, d_qk), and their positions, (n,)."""
    page_size = cache.shape[1]
    positions = np.arange(length)
    pages = table[: -(-length // page_size)].astype(np.int64)[positions // page_size]
    present = (pages >= 0) & (pages < cache.shape[0])
    positions = positions[present]
    if record:
        slots = pages[present] * page_size + positions % page_size
        (rows,) = cache_gather(cache, slots, kv_format=record, kv_scale=kv_scale)
        return rows.astype(np.float64), positions
    return cache[pages[present], positions % page_size].astype(np.float64), positions


def _places(cu_seqlens_q: npt.ArrayLike | None, b: int, s_q: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each sequence's queries are: the index along q's first axis, the first of them there, how many."""
    if cu_seqlens_q is None:
        yield from ((i, 0, s_q) for i in range(b))
        return
    starts = np.maximum.accumulate(np.clip(np.asarray(cu_seqlens_q, np.int64), 0, s_q))
    yield from ((0, int(begin), int(end - begin)) for begin, end in pairwise(starts))


def _visible(
    positions: Array, length: int, s_q: int, causal: bool, words: Array | None, window: int | None
) -> Iterator[tuple[slice, slice | Array]]:
    """Groups of query tokens, and the present keys that each group sees; `words` are a tree's mask."""
    if not causal:
        yield slice(0, s_q), slice(None)
        return
    drafts = positions - (length - s_q)
    for i in range(s_q):
        if words is None:
            first = 0 if window is None else int(np.searchsorted(drafts, i - window, side="right"))
            yield slice(i, i + 1), slice(first, int(np.searchsorted(drafts, i, side="right")))
        else:
            bits = words[i] >> np.maximum(drafts, 0).astype(np.uint64)
            yield slice(i, i + 1), (drafts < 0) | ((bits & np.uint64(1)) == 1)
