"""The indexer's selection: logits and top-k, through a buffer of bounded size."""

from __future__ import annotations

from typing import Any, NamedTuple

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import LogitsOptions
from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkOptions
from mla_cupy.kernels.pipeline import Call
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_count
from mla_cupy.ops.composite import (
    Composite,
    CompositePipeline,
    Division,
    Part,
    Stage,
    check_kernels,
    hashable,
    workspace_part,
)
from mla_cupy.ops.indexer import logits as logits_operation
from mla_cupy.ops.indexer import topk as topk_operation
from mla_cupy.ops.operation import Examined, Input, Output, Views, present
from mla_cupy.shapes import MAX_INT32

BUFFER_BYTES = 256 << 20
"""Default size of the buffer of logits."""
_MAX_BUFFER_BYTES = 1 << 40
MAX_SIZE = MAX_INT32 // 8
"""The most rows of a chunk, and keys."""


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
    relative: bool = True,
    keep_first: int = 0,
    keep_last: int = 0,
    buffer_bytes: int = BUFFER_BYTES,
    logits: Any = None,
    indices: Any = None,
    counts: Any = None,
    workspace: Any = None,
    kernel: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Select each query's keys: `indexer_topk` of `indexer_logits`, without storing the logits of all queries at once.

    Parameters
    ----------
    q, k, weights, ks, ke, k_scale, accumulate
        As for `indexer_logits`.
    topk : int
        Number of keys to select: 1 to 8192.
    order, keep_first, keep_last
        As for `indexer_topk`.
    relative : bool
        Count keys from `ks`, as sparse attention reads the rows of packed sequences. False: from the first key.
    buffer_bytes : int
        Size of the logits buffer. Queries are processed in chunks that fit, whatever `topk` is; a chunk has at least
        one query.
    logits : array, (rows, s_kv), float32, optional
        The buffer, one row per query of a chunk; the last axis is contiguous. Default: `buffer_bytes` of the workspace.
    indices : array, (s_q, topk), int32, optional
        Memory for the result; the last axis is contiguous.
    counts : array, (s_q,), int32, optional
        Memory for the numbers of selected keys.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_select, ...)` bytes.
    kernel : str or mapping, optional
        Name of a kernel to run, see `mla-cupy list`; or a name for each of the stages "logits" and "topk".
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
        If an argument does not fit; nothing has been launched, and no result is touched.

    Notes
    -----
    Exact and deterministic, like `indexer_topk`, for any size of the buffer. Two or three launches per chunk. With
    `indices`, `counts` and `workspace` the call can be captured in a CUDA graph.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mla_cupy
    >>> q, weights = np.ones((2, 1, 32), ml_dtypes.bfloat16), np.ones((2, 1), np.float32)
    >>> k = np.arange(4)[:, None] * np.ones((4, 32), ml_dtypes.bfloat16)
    >>> indices, counts = mla_cupy.indexer_select(q, k.astype(ml_dtypes.bfloat16), weights, topk=2)
    >>> indices.tolist(), counts.tolist()
    ([[2, 3], [2, 3]], [2, 2])
    """
    return call(indexer_select, locals())


class SelectOptions(NamedTuple):
    """The arguments other than arrays."""

    accumulate: Any
    topk: Any
    order: Any
    relative: Any
    keep_first: Any
    keep_last: Any
    buffer_bytes: Any
    kernel: Any


def check_selection(options: Any) -> Any:
    """Check the options that all selections share; returns them resolved.

    Raises
    ------
    ArgumentError
    """
    topk = check_count("topk", options.topk, 1, MAX_TOPK)
    chosen = topk_operation.check_topk_options(_of_topk(options))
    resolved = {name: getattr(chosen, name) for name in ("order", "relative", "keep_first", "keep_last")}
    resolved |= {"topk": topk, "buffer_bytes": check_count("buffer_bytes", options.buffer_bytes, 1, _MAX_BUFFER_BYTES)}
    return options._replace(**{name: value for name, value in resolved.items() if name in options._fields})


def _of_topk(options: Any, page_size: int = 1) -> TopkOptions:
    chosen: TopkOptions = topk_operation.OPERATION.options_of(
        k=options.topk,
        order=options.order,
        relative=getattr(options, "relative", False),
        page_size=page_size,
        keep_first=options.keep_first,
        keep_last=options.keep_last,
        return_values=False,
    )
    return chosen


def topk_stage(arrays: dict[str, Part | None], options: Any, page_size: int = 1) -> Stage:
    """The stage that selects from the logits of a chunk."""
    return Stage("topk", topk_operation.OPERATION, arrays, _of_topk(options, page_size))


def rows_of_buffer(rows: int, keys: int, buffer_bytes: int) -> int:
    """Rows of a chunk, of up to `rows` rows of logits; one at least."""
    return max(1, min(rows, buffer_bytes // (4 * max(1, keys)), MAX_SIZE))


def _of_logits(options: SelectOptions) -> LogitsOptions:
    chosen: LogitsOptions = logits_operation.OPERATION.options_of(accumulate=options.accumulate, clean=False)
    return chosen


def _examine(views: Views, options: SelectOptions) -> Examined:
    options = check_selection(options)
    logits_operation.OPERATION.examine(views, _of_logits(options))
    keys = present(views, "k").shape[0]
    if keys > MAX_SIZE:
        raise ShapeError(explain("k.shape[0]", keys, f"at most {MAX_SIZE}", "split the call: top-k supports no more"))
    resolved = options._replace(kernel=check_kernels(_PIPELINE, options.kernel))
    return Examined(None, resolved, sizes={"topk": options.topk})


def _divide(call: Call) -> Division:
    """Chunks of queries, one per row of the buffer."""
    options: SelectOptions = call.options
    parts = {name: None if view is None else Part(name, view) for name, view in call.views.items()}
    q, k = call.view("q"), call.view("k")
    s_q, s_kv = q.shape[0], k.shape[0]
    buffer, sizes = parts["logits"], {}
    if buffer is None:
        rows = rows_of_buffer(s_q, s_kv, options.buffer_bytes)
        buffer, sizes = workspace_part("buffer", (rows, s_kv), "float32", q.device), {"buffer": 4 * rows * s_kv}
    rows = min(buffer.view.shape[0], MAX_SIZE)
    steps: list[Stage] = []
    for begin in range(0, s_q, rows):
        end = min(s_q, begin + rows)

        def chunk(name: str, begin: int = begin, end: int = end) -> Part | None:
            return part.cut(0, begin, end) if (part := parts[name]) else None

        logits = buffer.cut(0, 0, end - begin)
        ranges = {name: chunk(name) for name in ("ks", "ke")}
        scored = {name: chunk(name) for name in ("q", "weights")}
        scored |= {**ranges, "k": parts["k"], "k_scale": parts["k_scale"], "logits": logits}
        steps.append(Stage("logits", logits_operation.OPERATION, scored, _of_logits(options)))
        results = {name: chunk(name) for name in ("indices", "counts")}
        steps.append(topk_stage({"logits": logits, **ranges, **results}, options))
    return Division(sizes, steps)


def int32(first: str) -> tuple[str, ...]:
    """The dtype of indices and counts."""
    return ("int32",)


_PIPELINE = CompositePipeline(logits=logits_operation.OPERATION, topk=topk_operation.OPERATION)

OPERATION = Composite(
    "indexer_select",
    inputs=(
        *logits_operation.OPERATION.inputs,
        Input("logits", "rows s_kv", ("float32",), optional=True, contiguous=True, scratch=True),
    ),
    outputs=(Output("indices", "s_q topk", int32, layout="rows"), Output("counts", "s_q", int32)),
    sizes=logits_operation.OPERATION.sizes,
    min_sizes={**logits_operation.OPERATION.min_sizes, "rows": 1},
    options=SelectOptions,
    examine=_examine,
    pipeline=_PIPELINE,
    divide=_divide,
    keys={"kernel": hashable},
)
