"""The indexer's selection: logits and top-k, through a buffer of bounded size."""

from __future__ import annotations

from typing import Any

from mla_cupy import arrays as families
from mla_cupy.errors import ShapeError, explain
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.logits import indexer_logits
from mla_cupy.ops.topk import TopkArguments, check_topk_options, indexer_topk

__all__ = ["indexer_select"]

BUFFER_BYTES = 64 << 20
"""Default size of the buffer of logits."""
MAX_BUFFER_BYTES = 1 << 40
"""Its largest size."""


def indexer_select(
    q: Any,
    k: Any,
    weights: Any,
    ks: Any = None,
    ke: Any = None,
    *,
    k_scale: Any = None,
    accumulate: str = "float32",
    topk: int = 2048,
    order: str = "index",
    relative: bool = False,
    keep_first: int = 0,
    keep_last: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    logits: Any = None,
    indices: Any = None,
    counts: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Select each query's keys: `indexer_topk` of `indexer_logits`, without the logits of all queries at once.

    Parameters
    ----------
    q, k, weights, ks, ke, k_scale, accumulate
        As for `indexer_logits`.
    topk : int
        How many keys to select: 1 to 8192.
    order, relative, keep_first, keep_last
        As for `indexer_topk`.
    buffer_bytes : int
        The queries are taken in chunks whose logits fit, whatever `topk` is; a chunk has one query at least.
    logits : array, (rows, s_kv), float32, optional
        The buffer, of which the rows are a chunk. Default: allocated, by `buffer_bytes`.
    indices : array, (s_q, topk), int32, optional
        Where the result goes; the last axis is contiguous.
    counts : array, (s_q,), int32, optional
        Where the numbers of selected keys go.
    workspace : array, (n,), uint8, optional
        As for `indexer_logits`, which uses it for every chunk.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    indices : array, (s_q, topk), int32
        -1 from counts[t] on.
    counts : array, (s_q,), int32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact and deterministic, as `indexer_topk` is, and the same for any size of the buffer. Two or three launches per
    chunk. With `logits`, `indices`, `counts` and `workspace` given it can be captured in a CUDA graph.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, weights = np.ones((2, 1, 32), ml_dtypes.bfloat16), np.ones((2, 1), np.float32)
    >>> k = np.arange(4)[:, None] * np.ones((4, 32), ml_dtypes.bfloat16)
    >>> indices, counts = mla_cupy.indexer_select(q, k.astype(ml_dtypes.bfloat16), weights, topk=2)
    >>> indices.tolist(), counts.tolist()
    ([[2, 3], [2, 3]], [2, 2])
    """
    chosen: dict[str, Any] = {"order": order, "relative": relative, "keep_first": keep_first, "keep_last": keep_last}
    check_topk_options(TopkArguments(k=topk, page_size=1, return_values=False, kernel=None, **chosen))
    check_count("buffer_bytes", buffer_bytes, 1, MAX_BUFFER_BYTES)
    family = families.common_family({"q": q, "k": k})
    (q_view, k_view) = (family.native.view(family.adopt(x), name) for name, x in (("q", q), ("k", k)))
    if len(q_view.shape) != 3 or len(k_view.shape) != 2:
        raise ShapeError(explain("q.shape and k.shape", (q_view.shape, k_view.shape), "(s_q, h, d) and (s_kv, d)"))
    (s_q, _, _), (s_kv, _) = q_view.shape, k_view.shape
    rows = max(1, min(s_q, buffer_bytes // (4 * max(1, s_kv))))
    shapes = {"logits": (rows, s_kv), "indices": (s_q, topk), "counts": (s_q,)}
    given = {"logits": logits, "indices": indices, "counts": counts}
    logits, indices, counts = given_or_new(family, shapes, given, q_view.device, stream)
    rows = logits.shape[0]
    if rows < 1 or len(logits.shape) != 2:
        raise ShapeError(explain("logits.shape", tuple(logits.shape), f"(rows, {s_kv}), one row at least"))
    for begin in range(0, s_q, rows):
        part = slice(begin, min(s_q, begin + rows))
        bounds: dict[str, Any] = {name: None if x is None else x[part] for name, x in (("ks", ks), ("ke", ke))}
        buffer = logits[: part.stop - begin]
        indexer_logits(
            q[part],
            k,
            weights[part],
            **bounds,
            k_scale=k_scale,
            accumulate=accumulate,
            clean=False,
            logits=buffer,
            workspace=workspace,
            stream=stream,
        )
        results = {"indices": indices[part], "counts": counts[part]}
        indexer_topk(buffer, topk, **bounds, **chosen, return_values=False, **results, stream=stream)
    return indices, counts


def given_or_new(
    family: families.Family, shapes: dict[str, tuple[int, ...]], given: dict[str, Any], device: int, stream: Any
) -> list[Any]:
    """The buffer of logits, the indices and the counts: those given, the last two of these shapes, or new ones.

    Raises
    ------
    ShapeError
    """
    made = []
    for name, shape in shapes.items():
        x = given[name]
        if x is None:
            handle = 0 if device < 0 else _launch_stream(family.native, device, stream)
            x = family.release(family.native.empty(shape, "float32" if name == "logits" else "int32", device, handle))
        elif name != "logits" and tuple(x.shape) != shape:
            raise ShapeError(explain(f"{name}.shape", tuple(x.shape), str(shape)))
        made.append(x)
    return made


def _launch_stream(native: Any, device: int, stream: Any) -> int:
    """The raw handle of the stream to run on: the caller's current one by default."""
    return int(native.current_stream(device)) if stream is None else families.stream_handle(stream)
