"""The checks of dense decode: every mistake of the caller, before any launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_cupy.arrays import View
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_QK, HEAD_DIM_V
from mla_cupy.ops.checks import (
    MOST_TOKENS,
    check_contiguous_along_last,
    check_d_v,
    check_device,
    check_float32,
    check_half,
    check_lse_base,
    check_rank,
    check_result,
    check_scale,
)


def check_inputs(q: View, kv: View, table: View, seqlens: View) -> View:
    """Check the inputs against each other; returns the cache with its head axis."""
    check_rank("q", q, (4,), "(b, s_q, h_q, 576)")
    check_rank("kv_cache", kv, (3, 4), "(num_pages, page_size, h_kv, 576), or without h_kv")
    check_rank("block_table", table, (2,), "(b, max_pages)")
    check_rank("seqlens", seqlens, (1,), "(b,)")
    if len(kv.shape) == 3:
        pages, page_size, width = kv.shape
        page, token, element = kv.strides
        kv = kv._replace(shape=(pages, page_size, 1, width), strides=(page, token, token, element))
    b, s_q, h_q, _ = q.shape
    _, page_size, h_kv, _ = kv.shape
    check_half("q", q.dtype)
    if kv.dtype != q.dtype:
        raise DTypeError(explain("kv_cache.dtype", kv.dtype, f"{q.dtype}, like q", "convert one of them"))
    for argument, view in (("block_table", table), ("seqlens", seqlens)):
        if view.dtype != "int32":
            raise DTypeError(explain(f"{argument}.dtype", view.dtype, "int32", f"convert {argument}"))
    for argument, view in (("q", q), ("kv_cache", kv)):
        if view.shape[-1] != HEAD_DIM_QK:
            remedy = "only d_qk = 576 (512 latent + 64 rope) is built"
            raise ShapeError(explain(f"{argument}.shape[-1]", view.shape[-1], str(HEAD_DIM_QK), remedy))
        check_contiguous_along_last(argument, view)
    if min(s_q, h_q, page_size, h_kv) < 1:
        sizes = f"s_q={s_q}, h_q={h_q}, page_size={page_size}, h_kv={h_kv}"
        raise ShapeError(explain("q and kv_cache", sizes, "sizes of at least 1"))
    if h_q % h_kv:
        raise ShapeError(explain("h_q", h_q, f"a multiple of h_kv={h_kv}", "every KV head serves as many query heads"))
    for argument, view in (("block_table", table), ("seqlens", seqlens)):
        if view.shape[0] != b:
            raise ShapeError(explain(f"{argument}.shape[0]", view.shape[0], f"b={b}, as in q"))
    for argument, view in (("block_table", table), ("seqlens", seqlens), ("kv_cache", kv)):
        check_device(argument, view, q)
    tokens = table.shape[1] * page_size
    if tokens > MOST_TOKENS:
        expected = f"at most {MOST_TOKENS} = 2^31 - 64"
        raise ShapeError(explain("max_pages * page_size", tokens, expected, "shorten block_table"))
    return kv


def check_outputs(q: View, out: View | None, lse: View | None, out_dtype: str | None) -> str:
    """Check the arrays for the results; returns the dtype of `out`."""
    b, s_q, h_q, _ = q.shape
    dtype = check_result("out", out, (b, s_q, h_q, HEAD_DIM_V), q, "q", out_dtype)
    check_float32("lse", lse, (b, h_q, s_q), q)
    return dtype


def check_scalars(d_v: int, scale: float | None, lse_base: str) -> float:
    """Check the numbers; returns the scale."""
    check_d_v(d_v, HEAD_DIM_V)
    check_lse_base(lse_base)
    check_scale(scale)
    return float(HEAD_DIM_QK**-0.5 if scale is None else scale)


def check_values(table: np.ndarray[Any, Any], seqlens: np.ndarray[Any, Any], num_pages: int, page_size: int) -> None:
    """Check what stands in the device's memory, on copies: for `check=True`."""
    capacity = table.shape[1] * page_size
    for request, length in enumerate(seqlens.tolist()):
        if not 0 <= length <= capacity:
            expected = f"0 to max_pages * page_size = {capacity}"
            raise ArgumentError(explain(f"seqlens[{request}]", length, expected))
        pages = table[request, : -(-length // page_size)]
        bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
        if bad.size:
            where = f"block_table[{request}, {bad[0]}]"
            raise ArgumentError(explain(where, int(pages[bad[0]]), f"a page of 0 to {num_pages - 1}"))
