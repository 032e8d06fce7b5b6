"""The checks that several operations share: of numbers, layouts and arrays for results."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mla_cupy.arrays import Family, View
from mla_cupy.errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain

HALF_TYPES = ("bfloat16", "float16")
MOST_TOKENS = 2**31 - 64
"""Of a list of tokens: the kernels count them in int32, in tiles of 64."""
_WIDE_BYTES = 16
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126
"""What float32 can hold, also when it is multiplied by log2(e)."""


def check_writable(family: Family, results: Mapping[str, object]) -> None:
    """Check that arrays for results, None for one not given, are of a library whose arrays can be written."""
    for argument, x in results.items():
        if x is not None and not family.mutable:
            raise DTypeError(explain(argument, f"an array of {family.name}", "None", "its arrays cannot be written"))


def check_d_v(d_v: int, built: int) -> None:
    if d_v != built:
        raise ArgumentError(explain("d_v", d_v, str(built), f"only d_v = {built} is built"))


def check_scale(scale: float | None) -> None:
    """Check the factor of the scores; None is good."""
    if scale is None:
        return
    if not (isinstance(scale, (int, float, np.floating)) and _LEAST_SCALE <= scale <= _MOST_SCALE):
        raise ArgumentError(explain("scale", repr(scale), "a finite number above 0, in float32"))


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
    elements = _WIDE_BYTES // (4 if view.dtype == "float32" else 2)
    if view.ptr % _WIDE_BYTES:
        return False
    for size, stride in zip(view.shape[:-1], view.strides, strict=False):
        if size > 1 and (stride % elements or stride <= 0):
            return False
    return True


def check_rank(argument: str, view: View, ranks: tuple[int, ...], form: str) -> None:
    if len(view.shape) not in ranks:
        raise ShapeError(explain(f"{argument}.shape", view.shape, form))


def check_half(argument: str, dtype: str) -> None:
    if dtype not in HALF_TYPES:
        remedy = "view 16-bit words as ml_dtypes.bfloat16" if dtype == "uint16" else f"convert {argument}"
        raise DTypeError(explain(f"{argument}.dtype", dtype, "bfloat16 or float16", remedy))


def check_contiguous_along_last(argument: str, view: View) -> None:
    if not contiguous_along_last(view):
        remedy = f"make {argument} contiguous along it"
        raise ShapeError(explain(f"{argument}.strides[-1]", view.strides[-1], "1 element", remedy))


def check_device(argument: str, view: View, q: View) -> None:
    if view.device != q.device:
        raise DeviceError(explain(f"{argument}'s device", view.device, f"{q.device}, like q", "move it"))


def check_result(
    argument: str,
    view: View | None,
    shape: tuple[int, ...],
    q: View,
    like: str,
    dtype: str | None,
    *,
    any_steps: bool = False,
) -> str:
    """Check an array for a 16-bit or float32 result; returns the dtype of the result.

    `like` is the argument whose dtype, that of `q`, the result has by default; `dtype` is the caller's choice. With
    `any_steps` only the last axis must be contiguous.
    """
    if dtype is not None and dtype not in (q.dtype, "float32"):
        raise DTypeError(explain(f"{argument}_dtype", dtype, f"{q.dtype}, like {like}, or float32"))
    if view is None:
        return dtype or q.dtype
    if view.shape != shape:
        raise ShapeError(explain(f"{argument}.shape", view.shape, str(shape)))
    if view.dtype not in (q.dtype, "float32") or (dtype is not None and view.dtype != dtype):
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, dtype or f"{q.dtype}, like {like}, or float32"))
    check_device(argument, view, q)
    if any_steps:
        check_contiguous_along_last(argument, view)
    elif not contiguous_along_last(view) or not steps_by_16_bytes(view):
        expected = "a contiguous last axis, and a start and further strides that are multiples of 16 bytes"
        raise ShapeError(explain(f"{argument}.strides", view.strides, expected, "pass a contiguous array"))
    return view.dtype


def check_float32(argument: str, view: View | None, shape: tuple[int, ...], q: View) -> None:
    """Check a float32 array of any strides; None is good."""
    if view is None:
        return
    if view.shape != shape:
        raise ShapeError(explain(f"{argument}.shape", view.shape, str(shape)))
    if view.dtype != "float32":
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, "float32"))
    check_device(argument, view, q)
