"""Merging partial attention results."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from mla_cupy import arrays
from mla_cupy.arrays import Native
from mla_cupy.errors import DeviceError, DTypeError, ShapeError, explain
from mla_cupy.launchers import merge_states as launcher
from mla_cupy.launchers.spec import DtypeVariant, Launch
from mla_cupy.ops import backend
from mla_cupy.ops.checks import HALF_TYPES, check_empty_lse, check_lse_base, check_writable, contiguous_along_last
from mla_cupy.runtime import device as devices


def merge_states(
    outs: Any,
    lses: Any,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: Any = None,
    lse: Any = None,
    out_dtype: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge n partial results of the same queries, over disjoint sets of keys, into the attention over all of them.

    lse = log(sum_n exp(lses[n])),  out = sum_n exp(lses[n] - lse) * outs[n]

    Parameters
    ----------
    outs : array, (n, b, s_q, h_q, d), bfloat16, float16 or float32
        Partial outputs, each normalised over its own keys; the last axis is contiguous.
    lses : array, (n, b, h_q, s_q), float32
        Their log-sum-exps. Both infinities mean that the row saw no key; its `outs` is then not read.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : array, (b, s_q, h_q, d), optional
        Where the result goes.
    lse : array, (b, h_q, s_q), float32, optional
        Where its log-sum-exp goes.
    out_dtype : str, optional
        A 16-bit dtype or "float32". Default: the dtype of `out`, or of `outs`.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, d)
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Deterministic: the states are added in order, in float32.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> outs = np.array([1.0, 3.0], np.float32).reshape(2, 1, 1, 1, 1)
    >>> out, lse = mla_cupy.merge_states(outs, np.zeros((2, 1, 1, 1), np.float32), lse_base="2")
    >>> float(out[0, 0, 0, 0]), float(lse[0, 0, 0])
    (2.0, 1.0)
    """
    family = arrays.common_family({"outs": outs, "lses": lses, "out": out, "lse": lse})
    check_writable(family, {"out": out, "lse": lse})
    arrays.check_stream(family, stream)
    lent = _Arguments(*(None if x is None else family.adopt(x) for x in (outs, lses, out, lse)))
    dtype = _check(family.native, lent, out_dtype, lse_base)
    options = _Options(dtype, lse_base, check_empty_lse(empty_lse), stream)
    if family.on_gpu:
        results = _merge_on_gpu(family.native, lent, options)
    elif backend.use_gpu():
        sent_outs, sent_lses = backend.sent(lent[:2], None, stream)
        on_gpu = _Arguments(sent_outs, sent_lses, None, None)
        fetched = backend.fetched(_merge_on_gpu(arrays.cupy_family(), on_gpu, options), stream)
        results = backend.deliver(fetched, lent[2:])
    else:
        merged = backend.reference_merge(lent.outs, lent.lses, lse_base=lse_base, empty_lse=empty_lse)
        results = backend.deliver(backend.rounded(merged, (dtype, "float32")), lent[2:])
    return (
        out if out is not None else family.release(results[0]),
        lse if lse is not None else family.release(results[1]),
    )


class _Arguments(NamedTuple):
    """Arrays of a native family."""

    outs: Any
    lses: Any
    out: Any
    lse: Any


class _Options(NamedTuple):
    """The rest of a call."""

    out_dtype: str
    lse_base: str
    empty_lse: float
    stream: Any


def _check(native: Native, arguments: _Arguments, out_dtype: str | None, lse_base: str) -> str:
    """Check everything; returns the dtype of `out`."""
    outs, lses = native.view(arguments.outs), native.view(arguments.lses)
    out = None if arguments.out is None else native.view(arguments.out)
    lse = None if arguments.lse is None else native.view(arguments.lse)
    check_lse_base(lse_base)
    floats = (*HALF_TYPES, "float32")
    if len(outs.shape) != 5 or min(outs.shape[0], outs.shape[4]) < 1:
        raise ShapeError(explain("outs.shape", outs.shape, "(n, b, s_q, h_q, d), with n and d of at least 1"))
    n, b, s_q, h_q, d = outs.shape
    if lses.shape != (n, b, h_q, s_q):
        raise ShapeError(explain("lses.shape", lses.shape, f"(n, b, h_q, s_q) = {(n, b, h_q, s_q)}"))
    if outs.dtype not in floats:
        raise DTypeError(explain("outs.dtype", outs.dtype, "bfloat16, float16 or float32"))
    if not contiguous_along_last(outs):
        raise ShapeError(explain("outs.strides[-1]", outs.strides[-1], "1 element", "make it contiguous along it"))
    if lses.dtype != "float32":
        raise DTypeError(explain("lses.dtype", lses.dtype, "float32"))
    if out is not None and out.shape != (b, s_q, h_q, d):
        raise ShapeError(explain("out.shape", out.shape, str((b, s_q, h_q, d))))
    if out is not None and not contiguous_along_last(out):
        raise ShapeError(explain("out.strides[-1]", out.strides[-1], "1 element"))
    if lse is not None and lse.shape != (b, h_q, s_q):
        raise ShapeError(explain("lse.shape", lse.shape, str((b, h_q, s_q))))
    if lse is not None and lse.dtype != "float32":
        raise DTypeError(explain("lse.dtype", lse.dtype, "float32"))
    dtype = out_dtype or (out.dtype if out is not None else outs.dtype)
    if out is not None and out.dtype != dtype:
        raise DTypeError(explain("out.dtype", out.dtype, dtype))
    if dtype not in floats or len({dtype, outs.dtype} - {"float32"}) > 1:
        raise DTypeError(explain("out_dtype", dtype, f"float32, or {outs.dtype} like outs"))
    for argument, view in (("lses", lses), ("out", out), ("lse", lse)):
        if view is not None and view.device != outs.device:
            raise DeviceError(explain(f"{argument}'s device", view.device, f"{outs.device}, like outs", "move it"))
    return dtype


@functools.lru_cache(maxsize=64)
def _kernel(dtype: str, device: int) -> Launch:
    return Launch(launcher.SPEC.request(DtypeVariant(dtype), devices.describe(device).arch), device)


def _merge_on_gpu(native: Native, arguments: _Arguments, options: _Options) -> tuple[Any, ...]:
    outs, lses = native.view(arguments.outs), native.view(arguments.lses)
    n, b, s_q, h_q, d = outs.shape
    device = outs.device
    stream = native.current_stream(device) if options.stream is None else arrays.stream_handle(options.stream)
    half = next((name for name in (outs.dtype, options.out_dtype) if name in HALF_TYPES), HALF_TYPES[0])
    kernel = _kernel(half, device)
    kernel.bind(stream)
    out, lse = arguments.out, arguments.lse
    if out is None:
        out = native.empty((b, s_q, h_q, d), options.out_dtype, device, stream)
    if lse is None:
        lse = native.empty((b, h_q, s_q), "float32", device, stream)
    if b * s_q * h_q == 0:
        return out, lse
    to, lse_to = native.view(out), native.view(lse)
    strides = (outs.strides[:4], lses.strides, to.strides[:3], lse_to.strides)
    pointers = launcher.MergePointers(outs.ptr, lses.ptr, to.ptr, lse_to.ptr, *strides)
    ln2 = math.log(2)
    to_log2, lse_factor = (1 / ln2, ln2) if options.lse_base == "e" else (1.0, 1.0)
    fp32 = (outs.dtype == "float32", options.out_dtype == "float32")
    launcher.launch(kernel, pointers, (n, b, s_q, h_q, d), (*fp32, to_log2, lse_factor, options.empty_lse), stream)
    return out, lse
