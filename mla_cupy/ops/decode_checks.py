"""The checks of dense decode: every mistake of the caller, before any launch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mla_cupy.arrays import View
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_QK, HEAD_DIM_V

HALF_TYPES = ("bfloat16", "float16")
_TMA_BYTES = 16
MOST_TOKENS = 2**31 - 64
"""Of a sequence: the kernels count tokens in int32, in tiles of 64."""
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126
"""What float32 can hold, also when it is multiplied by log2(e)."""


def check_inputs(q: View, kv: View, table: View, seqlens: View) -> View:
    """Check the inputs against each other; returns the cache with its head axis."""
    _rank("q", q, (4,), "(b, s_q, h_q, 576)")
    _rank("kv_cache", kv, (3, 4), "(num_pages, page_size, h_kv, 576), or without h_kv")
    _rank("block_table", table, (2,), "(b, max_pages)")
    _rank("seqlens", seqlens, (1,), "(b,)")
    if len(kv.shape) == 3:
        pages, page_size, width = kv.shape
        page, token, element = kv.strides
        kv = kv._replace(shape=(pages, page_size, 1, width), strides=(page, token, token, element))
    b, s_q, h_q, _ = q.shape
    _, page_size, h_kv, _ = kv.shape
    if q.dtype not in HALF_TYPES:
        remedy = "view 16-bit words as ml_dtypes.bfloat16" if q.dtype == "uint16" else "convert q"
        raise DTypeError(explain("q.dtype", q.dtype, "bfloat16 or float16", remedy))
    if kv.dtype != q.dtype:
        raise DTypeError(explain("kv_cache.dtype", kv.dtype, f"{q.dtype}, like q", "convert one of them"))
    for argument, view in (("block_table", table), ("seqlens", seqlens)):
        if view.dtype != "int32":
            raise DTypeError(explain(f"{argument}.dtype", view.dtype, "int32", f"convert {argument}"))
    for argument, view in (("q", q), ("kv_cache", kv)):
        if view.shape[-1] != HEAD_DIM_QK:
            remedy = "only d_qk = 576 (512 latent + 64 rope) is built"
            raise ShapeError(explain(f"{argument}.shape[-1]", view.shape[-1], str(HEAD_DIM_QK), remedy))
        if not contiguous_along_last(view):
            remedy = f"make {argument} contiguous along it"
            raise ShapeError(explain(f"{argument}.strides[-1]", view.strides[-1], "1 element", remedy))
    if min(s_q, h_q, page_size, h_kv) < 1:
        sizes = f"s_q={s_q}, h_q={h_q}, page_size={page_size}, h_kv={h_kv}"
        raise ShapeError(explain("q and kv_cache", sizes, "sizes of at least 1"))
    if h_q % h_kv:
        raise ShapeError(explain("h_q", h_q, f"a multiple of h_kv={h_kv}", "every KV head serves as many query heads"))
    for argument, view in (("block_table", table), ("seqlens", seqlens)):
        if view.shape[0] != b:
            raise ShapeError(explain(f"{argument}.shape[0]", view.shape[0], f"b={b}, as in q"))
        if view.device != q.device:
            raise DeviceError(explain(f"{argument}'s device", view.device, f"{q.device}, like q", "move it"))
    if kv.device != q.device:
        raise DeviceError(explain("kv_cache's device", kv.device, f"{q.device}, like q", "move it"))
    tokens = table.shape[1] * page_size
    if tokens > MOST_TOKENS:
        expected = f"at most {MOST_TOKENS} = 2^31 - 64"
        raise ShapeError(explain("max_pages * page_size", tokens, expected, "shorten block_table"))
    return kv


def check_outputs(q: View, out: View | None, lse: View | None, out_dtype: str | None) -> str:
    """Check the arrays for the results; returns the dtype of `out`."""
    b, s_q, h_q, _ = q.shape
    if out_dtype is not None and out_dtype not in (q.dtype, "float32"):
        raise DTypeError(explain("out_dtype", out_dtype, f"{q.dtype}, like q, or float32"))
    if out is not None:
        wanted = (b, s_q, h_q, HEAD_DIM_V)
        if out.shape != wanted:
            raise ShapeError(explain("out.shape", out.shape, str(wanted)))
        if out.dtype not in (q.dtype, "float32") or (out_dtype is not None and out.dtype != out_dtype):
            raise DTypeError(explain("out.dtype", out.dtype, out_dtype or f"{q.dtype}, like q, or float32"))
        if out.device != q.device:
            raise DeviceError(explain("out's device", out.device, f"{q.device}, like q"))
        if not contiguous_along_last(out) or not steps_by_16_bytes(out):
            expected = "a contiguous last axis, and a start and further strides that are multiples of 16 bytes"
            raise ShapeError(explain("out.strides", out.strides, expected, "pass a contiguous array"))
    if lse is not None:
        if lse.shape != (b, h_q, s_q):
            raise ShapeError(explain("lse.shape", lse.shape, str((b, h_q, s_q))))
        if lse.dtype != "float32":
            raise DTypeError(explain("lse.dtype", lse.dtype, "float32"))
        if lse.device != q.device:
            raise DeviceError(explain("lse's device", lse.device, f"{q.device}, like q"))
    return out.dtype if out is not None else out_dtype or q.dtype


def check_scalars(d_v: int, scale: float | None, lse_base: str) -> float:
    """Check the numbers; returns the scale."""
    if d_v != HEAD_DIM_V:
        raise ArgumentError(explain("d_v", d_v, str(HEAD_DIM_V), "only d_v = 512 is built"))
    check_lse_base(lse_base)
    if scale is None:
        return float(HEAD_DIM_QK**-0.5)
    if not (isinstance(scale, (int, float, np.floating)) and _LEAST_SCALE <= scale <= _MOST_SCALE):
        raise ArgumentError(explain("scale", repr(scale), "a finite number above 0, in float32"))
    return float(scale)


def check_lse_base(lse_base: str) -> None:
    if lse_base not in ("e", "2"):
        raise ArgumentError(explain("lse_base", repr(lse_base), '"e" or "2"'))


def check_empty_lse(empty_lse: float) -> float:
    """Check the number; infinities and NaN are good."""
    if isinstance(empty_lse, (int, float, np.floating)) and not _MOST_FLOAT32 < abs(empty_lse) < math.inf:
        return float(empty_lse)
    raise ArgumentError(explain("empty_lse", repr(empty_lse), "a number, as float32"))


def contiguous_along_last(view: View) -> bool:
    """Whether the last axis steps by 1 element. The strides of an array without elements mean nothing."""
    return view.strides[-1] == 1 or view.shape[-1] == 1 or 0 in view.shape


def steps_by_16_bytes(view: View) -> bool:
    """Whether the array starts at, and every axis but the last steps by, a multiple of 16 bytes; forwards."""
    if 0 in view.shape:
        return True
    elements = _TMA_BYTES // (4 if view.dtype == "float32" else 2)
    if view.ptr % _TMA_BYTES:
        return False
    for size, stride in zip(view.shape[:-1], view.strides, strict=False):
        if size > 1 and (stride % elements or stride <= 0):
            return False
    return True


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


def _rank(argument: str, view: View, ranks: tuple[int, ...], form: str) -> None:
    if len(view.shape) not in ranks:
        raise ShapeError(explain(f"{argument}.shape", view.shape, form))
