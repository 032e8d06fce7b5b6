"""The arguments that the sparse operations share, and every mistake in them, found before any launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mla_cupy.arrays import Native, View
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_V
from mla_cupy.launchers.sparse_forward_problem import HEAD_DIMS_QK
from mla_cupy.launchers.sparse_rows import SparseSelection
from mla_cupy.ops.checks import (
    MOST_TOKENS,
    check_contiguous_along_last,
    check_d_v,
    check_device,
    check_float32,
    check_half,
    check_lse_base,
    check_rank,
    check_scale,
)

Array = np.ndarray[Any, Any]

_MOST_INT32 = 2**31 - 1


class SparseViews(NamedTuple):
    """The arrays that forward and backward both take; None for an optional one that is not given."""

    q: View
    kv: View
    indices: View
    topk_length: View | None
    attn_sink: View | None
    cu_seqlens_q: View | None
    cu_seqlens_kv: View | None

    def selection(self, causal: bool) -> SparseSelection:
        """What the kernel that makes the lists of rows is told."""
        return SparseSelection(
            self.indices.ptr,
            _pointer(self.topk_length),
            _pointer(self.cu_seqlens_q),
            _pointer(self.cu_seqlens_kv),
            self.indices.strides,
            _stride(self.topk_length),
            _stride(self.cu_seqlens_q),
            _stride(self.cu_seqlens_kv),
            self.q.shape[0],
            self.kv.shape[0],
            self.indices.shape[1],
            0 if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1,
            bool(causal),
        )


def check_sparse_inputs(given: SparseViews) -> SparseViews:
    """Check the arrays against each other; returns them without their head axes."""
    check_rank("q", given.q, (3,), "(s_q, h_q, 576 or 512)")
    check_rank("kv", given.kv, (2, 3), "(s_kv, 576 or 512), or (s_kv, 1, ...)")
    check_rank("indices", given.indices, (2, 3), "(s_q, topk), or (s_q, 1, topk)")
    views = given._replace(kv=_without_head_axis("kv", given.kv), indices=_without_head_axis("indices", given.indices))
    q, kv, indices = views[:3]
    s_q, h_q, d_qk = q.shape
    check_half("q", q.dtype)
    if kv.dtype != q.dtype:
        raise DTypeError(explain("kv.dtype", kv.dtype, f"{q.dtype}, like q", "convert one of them"))
    if d_qk not in HEAD_DIMS_QK:
        expected = " or ".join(map(str, HEAD_DIMS_QK))
        raise ShapeError(explain("q.shape[-1]", d_qk, expected, "a latent of 512, with or without 64 of rope"))
    if kv.shape[-1] != d_qk:
        raise ShapeError(explain("kv.shape[-1]", kv.shape[-1], f"{d_qk}, like q"))
    if h_q < 1:
        raise ShapeError(explain("q.shape[1]", h_q, "at least 1 head"))
    for argument, view in (("q", q), ("kv", kv)):
        check_contiguous_along_last(argument, view)
    _check_int32("indices", indices)
    if indices.shape[0] != s_q:
        raise ShapeError(explain("indices.shape[0]", indices.shape[0], f"s_q={s_q}, as in q"))
    for argument, size, most in (
        ("q.shape[0]", s_q, _MOST_INT32),
        ("kv.shape[0]", kv.shape[0], _MOST_INT32),
        ("topk", indices.shape[1], MOST_TOKENS),
    ):
        if size > most:
            raise ShapeError(explain(argument, size, f"at most {most}", "the kernels count in int32"))
    _check_vectors(views, s_q, h_q)
    for argument, view in views._asdict().items():
        if view is not None:
            check_device(argument, view, q)
    return views


def _without_head_axis(argument: str, view: View) -> View:
    if len(view.shape) == 2:
        return view
    if view.shape[1] != 1:
        remedy = "all query heads share the rows, and what selects them"
        raise ShapeError(explain(f"{argument}.shape[1]", view.shape[1], "1 head", remedy))
    return view._replace(shape=(view.shape[0], view.shape[2]), strides=(view.strides[0], view.strides[2]))


def _check_vectors(views: SparseViews, s_q: int, h_q: int) -> None:
    if views.topk_length is not None:
        _check_int32("topk_length", views.topk_length)
        if views.topk_length.shape != (s_q,):
            raise ShapeError(explain("topk_length.shape", views.topk_length.shape, f"(s_q,) = {(s_q,)}"))
    check_float32("attn_sink", views.attn_sink, (h_q,), views.q)
    starts = {"cu_seqlens_q": views.cu_seqlens_q, "cu_seqlens_kv": views.cu_seqlens_kv}
    missing = [argument for argument, view in starts.items() if view is None]
    if len(missing) == 1:
        raise ArgumentError(explain(missing[0], None, "as many starts as its counterpart", "give both, or none"))
    for argument, view in starts.items():
        if view is None:
            continue
        _check_int32(argument, view)
        check_rank(argument, view, (1,), "(b + 1,)")
        if view.shape[0] < 1:
            raise ShapeError(explain(f"{argument}.shape", view.shape, "(b + 1,), with b of at least 0"))
    if views.cu_seqlens_q is not None and views.cu_seqlens_kv is not None:
        b = views.cu_seqlens_q.shape[0] - 1
        if views.cu_seqlens_kv.shape[0] != b + 1:
            expected = f"b + 1 = {b + 1}, as in cu_seqlens_q"
            raise ShapeError(explain("cu_seqlens_kv.shape[0]", views.cu_seqlens_kv.shape[0], expected))


def _check_int32(argument: str, view: View) -> None:
    if view.dtype != "int32":
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, "int32", f"convert {argument}"))


def check_sparse_scalars(d_v: int, scale: float | None, lse_base: str) -> None:
    check_d_v(d_v, HEAD_DIM_V)
    check_lse_base(lse_base)
    check_scale(scale)


def resolve_scale(scale: float | None, q: View) -> float:
    """The factor of the scores."""
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def check_sparse_values(native: Native, arguments: Mapping[str, Any], s_kv: int, causal: bool, stream: int) -> None:
    """Check what stands in the device's memory, on copies: for `check=True`.

    An index may be -1, which is no row, or of a row that its query may see.
    """
    names = ("indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
    given = [None if arguments[name] is None else native.to_numpy(arguments[name], stream) for name in names]
    indices, lengths, starts_q, starts_kv = given
    assert indices is not None
    indices = indices.reshape(indices.shape[0], indices.shape[-1])
    s_q, topk = indices.shape
    if lengths is None:
        lengths = np.full(s_q, topk)
    _name_first("topk_length", lengths, (lengths < 0) | (lengths > topk), f"0 to topk = {topk}")
    if starts_q is None or starts_kv is None:
        starts_q, starts_kv = np.array([0, s_q]), np.array([0, s_kv])
    for argument, starts, end in (("cu_seqlens_q", starts_q, s_q), ("cu_seqlens_kv", starts_kv, s_kv)):
        bad = (starts < 0) | (starts > end) | (np.diff(starts, prepend=starts[:1]) < 0)
        _name_first(argument, starts, bad, f"ascending starts of 0 to {end}")

    queries = np.arange(s_q)
    sequence = np.searchsorted(starts_q, queries, side="right") - 1
    outside = (sequence < 0) | (sequence >= len(starts_q) - 1)
    after = np.where(outside, 0, sequence) + 1
    limits = np.where(outside, 0, np.append(starts_kv, 0)[after] - starts_kv[after - 1])
    if causal:
        limits = limits - (np.append(starts_q, 0)[after] - 1 - queries)
    slots = np.arange(topk) < lengths[:, None]
    bad = slots & ((indices < -1) | (indices >= np.maximum(limits, 0)[:, None]))
    if bad.any():
        i, slot = np.argwhere(bad)[0]
        expected = f"-1, or a row of 0 to {limits[i] - 1}" if limits[i] > 0 else "-1: the query sees no row"
        raise ArgumentError(explain(f"indices[{i}, {slot}]", int(indices[i, slot]), expected))


def _name_first(argument: str, values: Array, bad: Array, expected: str) -> None:
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ArgumentError(explain(f"{argument}[{at}]", int(values[at]), expected))


def _pointer(view: View | None) -> int:
    return 0 if view is None else view.ptr


def _stride(view: View | None) -> int:
    return 0 if view is None else view.strides[0]
