"""The indexer's selection: logits and top-k, through a buffer of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import LogitsOptions
from mla_cupy.kernels.indexer.select import candidates
from mla_cupy.kernels.indexer.select.candidates import CandidateOptions
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
from mla_cupy.ops.indexer.select_candidates import OF_CANDIDATES, TOPK_OF_SOME_ROWS, problem_of
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.runtime.device import DeviceInfo
from mla_cupy.shapes import MAX_INT32

BUFFER_BYTES = 64 << 20
"""Default size of the buffer of logits."""
_MAX_BUFFER_BYTES = 1 << 40
MAX_SIZE = MAX_INT32 // 8
"""The most rows of a chunk, and keys."""
_ROWS = ("q", "weights", "ks", "ke", "indices", "counts")
"""Arrays with a row per query."""


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
    parts = _parts(call)
    q, k = call.view("q"), call.view("k")
    buffer, sizes = parts["logits"], {}
    if buffer is None:
        rows = rows_of_buffer(q.shape[0], k.shape[0], options.buffer_bytes)
        buffer = workspace_part("buffer", (rows, k.shape[0]), "float32", q.device)
        sizes = {"buffer": _nbytes(buffer)}
    return Division(sizes, _chunks(parts, buffer, options))


def _parts(call: Call) -> dict[str, Part | None]:
    return {name: None if view is None else Part(name, view) for name, view in call.views.items()}


def _nbytes(part: Part) -> int:
    return 4 * prod(part.view.shape)


def _cut(parts: Mapping[str, Part | None], names: Iterable[str], begin: int, end: int) -> dict[str, Part | None]:
    """The rows [begin, end) of arrays."""
    return {name: part.cut(0, begin, end) if (part := parts[name]) else None for name in names}


def _chunks(
    parts: Mapping[str, Part | None], buffer: Part, options: SelectOptions, topk: Operation = topk_operation.OPERATION
) -> list[Stage]:
    """Logits and their top-k for each chunk of queries."""
    q = parts["q"]
    assert q is not None
    s_q, rows = q.view.shape[0], min(buffer.view.shape[0], MAX_SIZE)
    keys = {name: parts[name] for name in ("k", "k_scale")}
    steps = []
    for begin in range(0, s_q, rows):
        end = min(s_q, begin + rows)
        logits = buffer.cut(0, 0, end - begin)
        chunk = _cut(parts, _ROWS, begin, end)
        scored = {name: chunk[name] for name in ("q", "weights", "ks", "ke")} | keys | {"logits": logits}
        steps.append(Stage("logits", logits_operation.OPERATION, scored, _of_logits(options)))
        results = {name: chunk[name] for name in ("ks", "ke", "indices", "counts")} | {"logits": logits}
        steps.append(topk_stage(results, options)._replace(operation=topk))
    return steps


def _asks_for_lists(kernels: Mapping[str, str]) -> bool:
    """True if the caller names the kernel of the lists alone: one name for all stages leaves the choice open."""
    return "candidates" in kernels and "logits" not in kernels


def _of_candidates(call: Call, device: DeviceInfo) -> Division | None:
    """Lists of candidates, where they are preferred and no kernel is named, or where the caller names their kernel.

    At the end, the rows whose lists lack keys go through chunks of logits; the other rows of these chunks are empty.
    """
    options: SelectOptions = call.options
    if options.kernel and "candidates" not in options.kernel:
        return None
    problem = problem_of(call.views, options)
    if call.views["logits"] is not None or candidates.unsupported(problem, device):
        return None
    if not (_asks_for_lists(options.kernel) or candidates.preferred(problem)):
        return None
    q, (s_kv, _) = call.view("q"), call.view("k").shape
    s_q = q.shape[0]
    capacity = candidates.sampling_of(options.topk, s_kv).capacity
    rows = candidates.rows_of_lists(s_q, capacity, options.buffer_bytes)
    if rows == 0:
        return None
    lists = workspace_part("buffer", (rows, 2 * capacity), "float32", q.device)
    logits = workspace_part("buffer", (rows_of_buffer(s_q, s_kv, options.buffer_bytes), s_kv), "float32", q.device)
    again = workspace_part("again", (2, s_q), "int32", q.device)
    parts = _parts(call) | {"again_begins": again.at(0), "again_ends": again.at(1)}
    steps = []
    for begin in range(0, s_q, rows):
        end = min(s_q, begin + rows)
        arrays = _cut(parts, (*_ROWS, "again_begins", "again_ends"), begin, end)
        arrays |= {"k": parts["k"], "k_scale": parts["k_scale"], "candidates": lists.cut(0, 0, end - begin)}
        chosen = CandidateOptions(options.topk, options.relative, fills=begin == 0, kernel=None)
        steps.append(Stage("candidates", OF_CANDIDATES, arrays, chosen))
    some = parts | {"ks": parts["again_begins"], "ke": parts["again_ends"]}
    sizes = {"buffer": max(_nbytes(lists), _nbytes(logits)), "again": _nbytes(again)}
    return Division(sizes, [*steps, *_chunks(some, logits, options, TOPK_OF_SOME_ROWS)])


def int32(first: str) -> tuple[str, ...]:
    """The dtype of indices and counts."""
    return ("int32",)


_PIPELINE = CompositePipeline(
    logits=logits_operation.OPERATION, topk=topk_operation.OPERATION, candidates=OF_CANDIDATES
)

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
    joined=_of_candidates,
    keys={"kernel": hashable},
)
