"""The inputs that the sparse operations share, and the mistakes in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ArgumentError, ShapeError, explain
from mla_cupy.kernels.attention.records import READ_FORWARD
from mla_cupy.kernels.sparse_forward.problem import HEAD_DIMS_QK
from mla_cupy.ops.cache import check_layout, check_no_format, record_read
from mla_cupy.ops.checks import STARTS, check_start_values, check_starts, name_first
from mla_cupy.ops.operation import Arrays, Input, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import D_V, MAX_INT32, MAX_TOKENS

Array = np.ndarray[Any, Any]

Q = Input("q", "s_q h_q d_qk", HALF, contiguous=True)
Q_KV = (Q, Input("kv", "s_kv 1? d_qk", ("=q",), contiguous=True))
#: Rows, or pages of records.
Q_ROWS_OR_PAGES = (Q, Input("kv", "s_kv page_tokens? d_kv", ("=q", *BYTE_DTYPES), contiguous=True))
INDICES = Input("indices", "s_q 1? topk", ("int32",))
OPTIONAL_INPUTS = (
    Input("topk_length", "s_q", ("int32",), optional=True),
    Input("attn_sink", "h_q", ("float32",), optional=True),
    *STARTS,
)
SIZES = {"d_qk": HEAD_DIMS_QK, "d_v": (D_V,)}
MIN_SIZES = {"h_q": 1, "b+1": 1}


class SparseSizes(NamedTuple):
    """The sizes of a problem, in its order."""

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int
    dtype: str


def check_rows_or_pages(views: Views, read: Sequence[str] = READ_FORWARD, name: object = None) -> str:
    """Check `kv`; returns the FP8 format of its pages, "" for 16-bit rows.

    A record is one of those that kernels `read`, and the one called `name` if that is given.

    Raises
    ------
    ShapeError
    """
    q, kv = present(views, "q"), present(views, "kv")
    d_qk, (_, page_size, width) = q.shape[2], kv.shape
    if kv.dtype not in BYTE_DTYPES:
        if page_size != 1:
            remedy = "pass one head: all query heads share the rows and their selection"
            raise ShapeError(explain("kv.shape[1]", page_size, "1 head", remedy))
        if width != d_qk:
            raise ShapeError(explain("kv.shape[-1]", width, f"d_qk={d_qk}, as in q"))
        check_no_format(name)
        return ""
    record = record_read(kv, d_qk, read, "kv", "read it by cache_gather", name)
    check_layout(record, kv, "kv")
    return record.name


def check_selection(views: Views) -> SparseSizes:
    """Check the inputs beyond their axes and dtypes.

    Raises
    ------
    ShapeError, ArgumentError
    """
    q, kv, indices = (present(views, name) for name in ("q", "kv", "indices"))
    s_q, h_q, d_qk = q.shape
    s_kv, topk = math.prod(kv.shape[:-1]), indices.shape[1]
    for argument, size, limit in (
        ("kv.shape[0]" if len(kv.shape) == 2 else "kv.shape[0] * kv.shape[1]", s_kv, MAX_INT32),
        ("topk", topk, MAX_TOKENS),
    ):
        if size > limit:
            raise ShapeError(explain(argument, size, f"at most {limit}", "the kernels count in int32"))
    check_starts(views)
    return SparseSizes(s_q, s_kv, h_q, topk, d_qk, q.dtype)


def aligned(views: Views, *names: str) -> bool:
    """True if these arrays start at, and step by, multiples of 16 bytes."""
    return all(steps_by_16_bytes(present(views, name)) for name in names)


def check_sparse_values(arrays: Arrays, options: Any) -> None:
    """Check the values of the index arrays: an index is -1, or a row that its query may see.

    Raises
    ------
    ArgumentError
        That names the first bad one.
    """
    kv, indices = present(arrays, "kv"), present(arrays, "indices")
    lengths, starts_q, starts_kv = (arrays[name] for name in ("topk_length", "cu_seqlens_q", "cu_seqlens_kv"))
    s_kv = math.prod(kv.shape[:-1])
    indices = indices.reshape(indices.shape[0], indices.shape[-1])
    s_q, topk = indices.shape
    if lengths is None:
        lengths = np.full(s_q, topk)
    name_first("topk_length", lengths, (lengths < 0) | (lengths > topk), f"0 to topk = {topk}")
    if starts_q is None or starts_kv is None:
        starts_q, starts_kv = np.array([0, s_q]), np.array([0, s_kv])
    check_start_values(arrays, s_q, s_kv)

    queries = np.arange(s_q)
    sequence = np.searchsorted(starts_q, queries, side="right") - 1
    outside = (sequence < 0) | (sequence >= len(starts_q) - 1)
    after = np.where(outside, 0, sequence) + 1
    limits = np.where(outside, 0, np.append(starts_kv, 0)[after] - starts_kv[after - 1])
    first = np.where(outside | options.relative, 0, starts_kv[after - 1])
    if options.causal:
        limits = limits - (np.append(starts_q, 0)[after] - 1 - queries)
    slots = np.arange(topk) < lengths[:, None]
    ends = first + np.maximum(limits, 0)
    bad = slots & (indices != -1) & ((indices < first[:, None]) | (indices >= ends[:, None]))
    if bad.any():
        i, slot = np.argwhere(bad)[0]
        rows = f"-1, or a row of {first[i]} to {ends[i] - 1}"
        expected = rows if limits[i] > 0 else "-1: the query sees no row"
        remedy = "pass relative=False for row numbers of kv" if options.relative and len(starts_kv) > 2 else ""
        raise ArgumentError(explain(f"indices[{i}, {slot}]", int(indices[i, slot]), expected, remedy))
