"""Inputs and checks that the operations of dense attention with keys and values per head share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import HALF
from mla_cupy.errors import ShapeError, either, explain
from mla_cupy.kernels.dense.problem import D_ROPE, GEOMETRIES
from mla_cupy.ops.checks import check_kv_heads, check_start_values, check_starts, pair_width
from mla_cupy.ops.operation import Arrays, Input, Views, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import MAX_TOKENS

QKV = (
    Input("q", "s_q h_q d_q", HALF, contiguous=True),
    Input("k", "s_kv h_kv d_k", ("=q",), contiguous=True),
    Input("v", "s_kv h_kv d_v", ("=q",), contiguous=True),
)
QKV_OR_CODES = (replace(QKV[0], dtypes=(*HALF, *reversed(BYTE_DTYPES))), *QKV[1:])
"""Queries, keys and values in 16 bits, or e4m3 codes."""
ROPES = (
    Input("q_rope", "s_q h_q d_rope", ("=q",), optional=True, contiguous=True),
    Input("k_rope", "s_kv h_rope? d_rope", ("=q",), optional=True, contiguous=True),
)
"""The last columns of queries and keys, as optional separate arrays."""
_WIDTHS_QK = tuple(dict.fromkeys(width for d_qk, _ in GEOMETRIES for width in (d_qk - D_ROPE, d_qk)))
_WIDTHS_V = tuple(dict.fromkeys(d_v for _, d_v in GEOMETRIES))
SIZES = {"d_q": _WIDTHS_QK, "d_k": _WIDTHS_QK, "d_v": _WIDTHS_V, "d_rope": (D_ROPE,)}
WIDTHS = f"(d_qk, d_v) is {either(GEOMETRIES)}; d_qk includes the {D_ROPE} columns of q_rope and k_rope"
"""The widths that go together."""
MIN_SIZES = {"h_q": 1, "h_kv": 1, "b+1": 1}


class Sizes(NamedTuple):
    """The first fields of a problem."""

    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int
    dtype: str
    sequences: int


def check_sizes(views: Views) -> Sizes:
    """Check the sizes of queries, keys and values against each other, and that either all starts are passed or none.

    Raises
    ------
    ShapeError, ArgumentError
    """
    q, v = present(views, "q"), present(views, "v")
    (s_q, h_q, _), (s_kv, h_kv, d_v) = q.shape, v.shape
    for argument, size in (("q.shape[0]", s_q), ("k.shape[0]", s_kv)):
        if size > MAX_TOKENS:
            raise ShapeError(explain(argument, size, f"at most {MAX_TOKENS}", "the kernels count in int32"))
    d_qk = _check_geometry(views, d_v)
    check_kv_heads(views, h_q, h_kv)
    check_starts(views)
    starts = views["cu_seqlens_q"]
    dtype = "float8_e4m3fn" if q.dtype in BYTE_DTYPES else q.dtype
    return Sizes(s_q, s_kv, h_q, h_kv, d_qk, d_v, dtype, 1 if starts is None else starts.shape[0] - 1)


def aligned(views: Views, *others: str) -> bool:
    """True if rows of queries, keys and values, and of `others`, start at and step by multiples of 16 bytes."""
    names = (*(array.name for array in (*QKV, *ROPES)), *others)
    return all(steps_by_16_bytes(view) for name in names if (view := views[name]) is not None)


def _check_geometry(views: Views, d_v: int) -> int:
    """The width of queries and keys."""
    d_qk = pair_width(views)
    if (d_qk, d_v) not in GEOMETRIES:
        raise ShapeError(explain("q.shape[-1], v.shape[-1]", (d_qk, d_v), either(GEOMETRIES)))
    return d_qk


def check_prefill_values(arrays: Arrays, options: Any) -> None:
    """Check where the sequences begin.

    Raises
    ------
    ArgumentError
    """
    check_start_values(arrays, len(present(arrays, "q")), len(present(arrays, "k")))
