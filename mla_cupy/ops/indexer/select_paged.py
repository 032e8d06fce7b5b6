"""The indexer's selection over pages of index keys, for the next tokens of sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.indexer.logits.problem import PagedLogitsOptions
from mla_cupy.kernels.indexer.select import SELECT
from mla_cupy.kernels.indexer.select.problem import SelectOptions, SelectProblem
from mla_cupy.kernels.pipeline import Call
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_flag
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
from mla_cupy.ops.indexer import logits_paged as logits_operation
from mla_cupy.ops.indexer import topk as topk_operation
from mla_cupy.ops.indexer.select import BUFFER_BYTES, MAX_SIZE, check_selection, int32, rows_of_buffer, topk_stage
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present
from mla_cupy.runtime.device import DeviceInfo


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
    kernel: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Select the cached keys of each sequence's next tokens: `indexer_topk` of `indexer_logits_paged`.

    Parameters
    ----------
    q, cache, weights, seqlens, block_table
        As for `indexer_logits_paged`. The first two axes of seqlens (b, s_q) step evenly.
    topk : int
        Number of keys to select: 1 to 8192.
    slots : bool
        Return slots of the cache, page * page_size + token, the `indices` of `sparse_mla_decode` for a cache with the
        same block table. If False, return positions in the sequences.
    order, keep_first, keep_last
        As for `indexer_topk`; "index" sorts by position, whatever `slots` is.
    buffer_bytes : int
        Size of the logits buffer. Sequences are processed in chunks that fit; a chunk has at least one sequence.
    logits : array, (rows, max_pages * page_size), float32, optional
        The buffer; a chunk has rows // s_q sequences; the last axis is contiguous. Default: `buffer_bytes` of the
        workspace.
    indices : array, (b, s_q, topk), int32, optional
        Memory for the result; the first two axes step evenly, the last one is contiguous.
    counts : array, (b, s_q), int32, optional
        Memory for the numbers of selected keys; the axes step evenly.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_select_paged, ...)` bytes.
    kernel : str or mapping, optional
        Name of a kernel to run, see `mla-cupy list`; or a name for each of the stages "logits" and "topk", or for
        "select", which does both.
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
        If an argument does not fit; nothing has been launched, and no result is touched.

    Notes
    -----
    Exact and deterministic, like `indexer_topk`, for any size of the buffer. Two or three launches per chunk; on Hopper
    one, without a buffer, for up to seven tokens with block tables of up to 32,768 keys. With `indices`, `counts` and
    `workspace` the call can be captured in a CUDA graph; replays follow the lengths and the block table. Not for JAX,
    whose arrays cannot be written: `mla_cupy.jax` has the two operations.

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
    return call(indexer_select_paged, locals())


class PagedSelectOptions(NamedTuple):
    """The arguments other than arrays."""

    topk: Any
    slots: Any
    order: Any
    keep_first: Any
    keep_last: Any
    buffer_bytes: Any
    kernel: Any


_OF_LOGITS = PagedLogitsOptions(clean=False, out_dtype=None, kernel=None)


def _examine(views: Views, options: PagedSelectOptions) -> Examined:
    options = check_selection(options)
    slots = check_flag("slots", options.slots)
    logits_operation.OPERATION.examine(views, _OF_LOGITS)
    q, cache, table = (present(views, name) for name in ("q", "cache", "block_table"))
    s_q, keys = q.shape[1], table.shape[1] * cache.shape[1]
    if s_q > MAX_SIZE or keys > MAX_SIZE:
        got = f"s_q={s_q}, max_pages * page_size={keys}"
        raise ShapeError(
            explain("q and block_table", got, f"at most {MAX_SIZE}", "split the call: top-k supports no more")
        )
    buffer = views["logits"]
    if buffer is not None and buffer.shape[0] < max(1, s_q):
        raise ShapeError(explain("logits.shape[0]", buffer.shape[0], f"at least s_q={s_q} rows, of a sequence"))
    resolved = options._replace(slots=slots, kernel=check_kernels(_PIPELINE, options.kernel))
    return Examined(None, resolved, sizes={"topk": options.topk})


def _divide(call: Call) -> Division:
    """Chunks of sequences, s_q rows of the buffer each."""
    options: PagedSelectOptions = call.options
    parts = {name: None if view is None else Part(name, view) for name, view in call.views.items()}
    (b, s_q, _, _), page_size = call.view("q").shape, call.view("cache").shape[1]
    keys = call.view("block_table").shape[1] * page_size
    if s_q == 0:
        return Division({}, ())
    buffer, sizes = parts["logits"], {}
    if buffer is None:
        rows = rows_of_buffer(b, keys * s_q, options.buffer_bytes) * s_q
        buffer = workspace_part("buffer", (rows, keys), "float32", call.view("q").device)
        sizes = {"buffer": 4 * rows * keys}
    count = min(buffer.view.shape[0], MAX_SIZE) // s_q
    steps: list[Stage] = []
    for begin in range(0, b, count):
        end = min(b, begin + count)

        def chunk(name: str, begin: int = begin, end: int = end) -> Part:
            part = parts[name]
            assert part is not None
            return part.cut(0, begin, end)

        logits = buffer.cut(0, 0, (end - begin) * s_q)
        scored: dict[str, Part | None] = {name: chunk(name) for name in ("q", "weights", "seqlens", "block_table")}
        scored |= {"cache": parts["cache"], "logits": logits.split(s_q)}
        steps.append(Stage("logits", logits_operation.OPERATION, scored, _OF_LOGITS))
        selected: dict[str, Part | None] = {name: chunk(name).flat() for name in ("indices", "counts")}
        selected |= {"logits": logits, "ke": chunk("seqlens").flat()}
        selected["block_table"] = chunk("block_table") if options.slots else None
        steps.append(topk_stage(selected, options, page_size if options.slots else 1))
    return Division(sizes, steps)


def _examine_joined(views: Views, options: SelectOptions) -> Examined:
    logits = logits_operation.OPERATION.examine(views, _OF_LOGITS).problem
    sizes = {"rows": logits.num_tokens, "topk": options.topk}
    return Examined(SelectProblem(logits, options.order), options, sizes)


def _join(call: Call, device: DeviceInfo) -> Division | None:
    """One launch, where the caller names its kernel, or where it is preferred and no kernel is named."""
    given: PagedSelectOptions = call.options
    options = SelectOptions(given.topk, given.slots, given.order, given.keep_first, given.keep_last, None)
    problem = _examine_joined(call.views, options).problem
    named = given.kernel
    if problem.logits.num_tokens == 0 or (named and "select" not in named):
        return None
    if not named and not SELECT.prefers(problem, device):
        return None
    parts = {name: Part(name, call.view(name)) for name in _JOINED.names}
    parts |= {name: parts[name].flat() for name in ("indices", "counts")}
    return Division({}, (Stage("select", _JOINED, parts, options),))


def _joined() -> Operation:
    """Logits and selection as one stage: it has no public function."""
    logits = logits_operation.OPERATION
    return Operation(
        "indexer_select_joined",
        inputs=logits.inputs,
        outputs=(Output("indices", "rows topk", int32, layout="rows"), Output("counts", "rows", int32)),
        sizes=logits.sizes,
        min_sizes=logits.min_sizes,
        options=SelectOptions,
        examine=_examine_joined,
        pipeline=SELECT,
        internal=True,
    )


_JOINED = _joined()
_PIPELINE = CompositePipeline(logits=logits_operation.OPERATION, topk=topk_operation.OPERATION, select=_JOINED)

OPERATION = Composite(
    "indexer_select_paged",
    inputs=(
        *(replace(array, even=array.name == "seqlens") for array in logits_operation.OPERATION.inputs),
        Input("logits", "rows max_pages*page_size", ("float32",), optional=True, contiguous=True, scratch=True),
    ),
    outputs=(
        Output("indices", "b s_q topk", int32, layout="rows", even=True),
        Output("counts", "b s_q", int32, even=True),
    ),
    sizes=logits_operation.OPERATION.sizes,
    min_sizes=logits_operation.OPERATION.min_sizes,
    options=PagedSelectOptions,
    examine=_examine,
    pipeline=_PIPELINE,
    divide=_divide,
    joined=_join,
    keys={"kernel": hashable},
)
