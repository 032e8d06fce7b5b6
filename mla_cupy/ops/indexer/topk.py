"""Exact top-k of the indexer's logits."""

from __future__ import annotations

from typing import Any

from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.indexer.topk import TOPK
from mla_cupy.kernels.indexer.topk.problem import MAX_TOPK, TopkOptions, TopkProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_count, check_flag
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, only_int32, present
from mla_cupy.shapes import MAX_INT32

ORDERS = ("index", "value")


def indexer_topk(
    logits: Any,
    k: int = 2048,
    *,
    ks: Any = None,
    ke: Any = None,
    block_table: Any = None,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
    indices: Any = None,
    counts: Any = None,
    values: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Select the k largest logits of each row, exactly.

    Larger logits come first; among equal logits the lower index comes first. -0 equals +0, and NaN comes last, after
    -inf.

    Parameters
    ----------
    logits : array, (s_q, s_kv), float32 or bfloat16
        Scores of every key for every query. The last axis is contiguous.
    k : int
        Number of keys to select: 1 to 8192.
    ks, ke : array, (s_q,), int32, optional
        Row t selects among the keys ks[t] <= s < ke[t]; both are clamped to [0, s_kv]. Default: all. Logits outside are
        not read. ke may have one number per sequence, like `seqlens` of `indexer_logits_paged`, for b sequences where b
        divides s_q: it belongs to the last of the sequence's s_q / b consecutive rows, and each row before sees one key
        less than the next.
    block_table : array, (b, max_pages), int32, optional
        Return slots of a paged cache: key s of a row becomes block_table[., s // page_size] * page_size + s %
        page_size, or -1 past the table's end and where the result is negative or exceeds int32. b divides s_q; each
        sequence has s_q / b consecutive rows.
    order : str
        "index": ascending, the fastest order for sparse attention. "value": the largest logit first, after the keys of
        `keep_first` and `keep_last`, which come in ascending order, whatever their logits.
    relative : bool
        Count indices from ks[t], as `sparse_mla_forward` does with `cu_seqlens_kv`. Excludes `block_table`.
    page_size : int
        Tokens per page of `block_table`.
    keep_first, keep_last : int
        Number of keys at the beginning and at the end of each range that are selected before all others; if they are
        more than k, the lowest indices are selected.
    return_values : bool
        Also return the logits at the indices.
    indices : array, (s_q, k), int32, optional
        Memory for the result; the last axis is contiguous.
    counts : array, (s_q,), int32, optional
        Memory for the numbers of selected keys.
    values : array, (s_q, k), float32, optional
        Memory for the logits; the last axis is contiguous.
    workspace : array, (n,), uint8, optional
        Unused: `workspace_bytes(indexer_topk, ...)` is 0.
    kernel : str, optional
        Name of the kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    indices : array, (s_q, k), int32
        -1 from counts[t] on.
    counts : array, (s_q,), int32
        min(k, keys in the range): the `topk_length` of `sparse_mla_forward`.
    values : array, (s_q, k), float32, or None
        -inf from counts[t] on. None without `return_values`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Exact: the result depends on the logits alone, neither on the run nor on the kernel. Rows of at most k keys are not
    read, unless values are returned or determine the order.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> logits = np.array([[0.5, 2.0, -1.0, 2.0, 0.0]], np.float32)
    >>> indices, counts, values = mla_cupy.indexer_topk(logits, 3)
    >>> indices.tolist(), counts.tolist(), values.tolist()
    ([[0, 1, 3]], [3], [[0.5, 2.0, 2.0]])
    >>> mla_cupy.indexer_topk(logits, 3, order="value", ke=np.array([2], np.int32))[0].tolist()
    [[1, 0, -1]]
    """
    return call(indexer_topk, locals())


def check_topk_options(given: TopkOptions) -> TopkOptions:
    """Check the numbers and flags of a selection.

    Raises
    ------
    ArgumentError
    """
    if not (isinstance(given.order, str) and given.order in ORDERS):
        raise ArgumentError(explain("order", repr(given.order), '"index" or "value"'))
    return given._replace(
        k=check_count("k", given.k, 1, MAX_TOPK),
        relative=check_flag("relative", given.relative),
        page_size=check_count("page_size", given.page_size, 1, MAX_INT32),
        keep_first=check_count("keep_first", given.keep_first, 0, MAX_INT32),
        keep_last=check_count("keep_last", given.keep_last, 0, MAX_INT32),
        return_values=check_flag("return_values", given.return_values),
    )


def _examine(views: Views, given: TopkOptions) -> Examined:
    options = check_topk_options(given)
    s_q, s_kv = present(views, "logits").shape
    table = views["block_table"]
    for argument, size in (("logits.shape[0]", s_q), ("logits.shape[1]", s_kv)):
        if size > MAX_INT32 // 8:
            raise ShapeError(explain(argument, size, f"at most {MAX_INT32 // 8}", "split the call"))
    ke = views["ke"]
    if ke is not None and ke.shape[0] != s_q and (ke.shape[0] == 0 or s_q % ke.shape[0]):
        raise ShapeError(explain("ke.shape[0]", ke.shape[0], f"s_q={s_q}, as in logits, or one per sequence"))
    if table is not None and s_q % table.shape[0]:
        raise ShapeError(explain("logits.shape[0]", s_q, f"a multiple of {table.shape[0]}, the rows of block_table"))
    if table is not None and options.relative:
        raise ArgumentError(explain("relative", "True, with a block_table", "False: pages count from the first token"))
    return Examined(TopkProblem(s_q, s_kv, options.k), options, {"k": options.k})


OPERATION = Operation(
    "indexer_topk",
    inputs=(
        Input("logits", "s_q s_kv", ("float32", "bfloat16"), contiguous=True),
        Input("ks", "s_q", ("int32",), optional=True),
        Input("ke", "ends", ("int32",), optional=True),
        Input("block_table", "tables max_pages", ("int32",), optional=True),
    ),
    outputs=(
        Output("indices", "s_q k", only_int32, layout="rows"),
        Output("counts", "s_q", only_int32),
        Output("values", "s_q k", layout="rows", when="return_values"),
    ),
    min_sizes={"tables": 1},
    options=TopkOptions,
    parallel={"s_q": ("ends", "tables")},
    examine=_examine,
    pipeline=TOPK,
)
