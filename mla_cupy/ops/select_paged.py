"""The indexer's selection over pages of index keys, for the next tokens of sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy import arrays as families
from mla_cupy.arrays.view import View
from mla_cupy.errors import ShapeError, explain
from mla_cupy.ops.checks import check_count, check_flag
from mla_cupy.ops.logits_paged import indexer_logits_paged
from mla_cupy.ops.schema import check_even
from mla_cupy.ops.select import BUFFER_BYTES, MAX_BUFFER_BYTES, given_or_new
from mla_cupy.ops.topk import TopkArguments, check_topk_options, indexer_topk

__all__ = ["indexer_select_paged"]


def indexer_select_paged(
    q: Any,
    cache: Any,
    weights: Any,
    seqlens: Any,
    block_table: Any,
    *,
    topk: int = 2048,
    slots: bool = True,
    order: str = "index",
    keep_first: int = 0,
    keep_last: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    logits: Any = None,
    indices: Any = None,
    counts: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Select the cached keys of each sequence's next tokens: `indexer_topk` of `indexer_logits_paged`.

    Parameters
    ----------
    q, cache, weights, seqlens, block_table
        As for `indexer_logits_paged`. The first two axes of seqlens (b, s_q) step evenly.
    topk : int
        How many keys to select: 1 to 8192.
    slots : bool
        Whether to return places in the cache, page * page_size + token: what `sparse_mla_decode` takes as `indices` of
        a cache with the same block table. Else positions in the sequences.
    order, keep_first, keep_last
        As for `indexer_topk`; "index" is the order of positions, whatever `slots`.
    buffer_bytes : int
        The sequences are taken in chunks whose logits fit; a chunk has one sequence at least.
    logits : array, (rows, max_pages * page_size), float32, optional
        The buffer; a chunk is as many sequences as there are s_q rows for. Default: allocated, by `buffer_bytes`.
    indices : array, (b, s_q, topk), int32, optional
        Where the result goes; the first two axes step evenly, the last one is contiguous.
    counts : array, (b, s_q), int32, optional
        Where the numbers of selected keys go; the axes step evenly.
    workspace : array, (n,), uint8, optional
        As for `indexer_logits_paged`, which uses it for every chunk.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    indices : array, (b, s_q, topk), int32
        -1 from counts[n, i] on.
    counts : array, (b, s_q), int32
        min(topk, keys that the token sees).

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact and deterministic, as `indexer_topk` is, and the same for any size of the buffer. Two or three launches per
    chunk. With `logits`, `indices`, `counts` and `workspace` given it can be captured in a CUDA graph, whose replays
    follow the lengths and the block table. Not for JAX, whose arrays cannot be written: `mla_cupy.jax` has the two
    operations.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> cache, table = np.zeros((4, 4, 36), np.uint8), np.array([[3]], np.int32)
    >>> keys = np.array([[1], [3], [2]]) * np.ones((3, 32))
    >>> slots = np.array([12, 13, 14])  # page 3
    >>> mla_cupy.indexer_cache_append(keys.astype(ml_dtypes.bfloat16), cache, slots, hadamard=False)
    >>> q, weights = np.full((1, 1, 1, 32), 0x38, np.uint8), np.ones((1, 1, 1), np.float32)
    >>> indices, counts = mla_cupy.indexer_select_paged(q, cache, weights, np.array([3], np.int32), table, topk=2)
    >>> indices.tolist(), counts.tolist()
    ([[[13, 14]]], [[2]])
    """
    chosen: dict[str, Any] = {"order": order, "keep_first": keep_first, "keep_last": keep_last}
    check_topk_options(TopkArguments(k=topk, relative=False, page_size=1, return_values=False, kernel=None, **chosen))
    wants_slots = check_flag("slots", slots)
    check_count("buffer_bytes", buffer_bytes, 1, MAX_BUFFER_BYTES)
    family = families.common_family({"q": q, "cache": cache})
    sizes = _sizes(family, q, cache, block_table, seqlens, weights)
    given = {"logits": logits, "indices": indices, "counts": counts}
    logits, indices, counts = _results(family, sizes, topk, buffer_bytes, given, stream)
    b, s_q, keys, page_size, _ = sizes
    if 0 in (b, s_q):
        return indices, counts
    table = {"block_table": block_table, "page_size": page_size} if wants_slots else {}
    step = logits.shape[0] // s_q
    for begin in range(0, b, step):
        part = slice(begin, min(b, begin + step))
        rows = (part.stop - begin) * s_q
        buffer = logits[:rows]
        indexer_logits_paged(
            q[part],
            cache,
            weights[part],
            seqlens[part],
            block_table[part],
            clean=False,
            logits=buffer.reshape(part.stop - begin, s_q, keys),
            workspace=workspace,
            stream=stream,
        )
        if table:
            table["block_table"] = block_table[part]
        results = {"indices": indices[part].reshape(rows, topk), "counts": counts[part].reshape(rows)}
        ends = seqlens[part].reshape(-1)
        indexer_topk(buffer, topk, ke=ends, **table, **chosen, return_values=False, **results, stream=stream)
    return indices, counts


class _Sizes(NamedTuple):
    """The sizes of a call; `keys` is how many tokens a sequence may have."""

    b: int
    s_q: int
    keys: int
    page_size: int
    device: int


def _sizes(family: families.Family, q: Any, cache: Any, block_table: Any, seqlens: Any, weights: Any) -> _Sizes:
    """Raises ShapeError if an array has another number of axes, or seqlens steps unevenly."""
    shapes = {"q": 4, "cache": 3, "block_table": 2, "seqlens": 1, "weights": 3}
    views = {
        name: _view(family.native, family.adopt(x), name, least)
        for (name, least), x in zip(shapes.items(), (q, cache, block_table, seqlens, weights), strict=True)
    }
    if len(views["seqlens"].shape) == 2:
        check_even("seqlens", views["seqlens"])
    q_view, page_size = views["q"], views["cache"].shape[1]
    b, s_q = q_view.shape[:2]
    return _Sizes(b, s_q, views["block_table"].shape[1] * page_size, page_size, q_view.device)


def _results(
    family: families.Family, sizes: _Sizes, topk: int, buffer_bytes: int, given: dict[str, Any], stream: Any
) -> list[Any]:
    """The buffer of logits, the indices and the counts: those given, checked, or new ones."""
    b, s_q, keys, _, device = sizes
    wanted = max(1, min(b, buffer_bytes // (4 * max(1, keys * s_q)))) * s_q
    shapes = {"logits": (wanted, keys), "indices": (b, s_q, topk), "counts": (b, s_q)}
    made = given_or_new(family, shapes, given, device, stream)
    for name in ("indices", "counts"):
        if (x := given[name]) is not None:
            check_even(name, family.native.view(family.adopt(x), name))
    buffer = tuple(made[0].shape)
    if len(buffer) != 2 or buffer[0] < s_q or buffer[1] != keys:
        raise ShapeError(explain("logits.shape", buffer, f"(rows, {keys}), of s_q={s_q} rows at least"))
    return made


def _view(native: Any, x: Any, name: str, least: int) -> View:
    """A view of an array of `least` axes or one more."""
    view: View = native.view(x, name)
    if not least <= len(view.shape) <= least + (name in ("cache", "seqlens")):
        raise ShapeError(explain(f"{name}.shape", view.shape, f"{least} axes"))
    return view
