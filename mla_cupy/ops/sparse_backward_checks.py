"""The checks of the sparse backward: every mistake of the caller, before any launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mla_cupy.arrays import View
from mla_cupy.errors import DTypeError, ShapeError, explain
from mla_cupy.launchers.decode_problem import HEAD_DIM_V
from mla_cupy.launchers.sparse_backward_sequence import Strided
from mla_cupy.ops.checks import check_contiguous_along_last, check_device, check_float32, check_result
from mla_cupy.ops.sparse_checks import SparseViews, check_sparse_inputs


class BackwardViews(NamedTuple):
    """The arrays of a call, and what the checks found out about them."""

    inputs: SparseViews
    out: View
    dout: View
    lse: View
    dq: View | None
    dkv: View | None
    kv_shape: tuple[int, ...]  # with its head axis, if it has one
    dkv_dtype: str


def check_backward(given: Mapping[str, Any], dkv_dtype: str | None) -> BackwardViews:
    """Check the arrays, by their names, against each other."""
    inputs = check_sparse_inputs(SparseViews(**{name: given[name] for name in SparseViews._fields}))
    out, dout, lse, kv, dkv = (given[name] for name in ("out", "dout", "lse", "kv", "dkv"))
    q = inputs.q
    s_q, h_q, _ = q.shape
    _check_rows("out", out, q, (q.dtype, "float32"))
    _check_rows("dout", dout, q, (q.dtype,))
    check_float32("lse", lse, (s_q, h_q), q)
    check_result("dq", given["dq"], q.shape, q, "q", q.dtype)
    dkv_dtype = check_result("dkv", dkv, kv.shape, q, "kv", dkv_dtype, any_steps=True)
    if dkv is not None and dkv.shape[0] > 1 and abs(dkv.strides[0]) < kv.shape[-1]:
        raise ShapeError(explain("dkv.strides[0]", dkv.strides[0], f"at least {kv.shape[-1]}, so that rows are apart"))
    return BackwardViews(inputs, out, dout, lse, given["dq"], dkv, kv.shape, dkv_dtype)


def _check_rows(argument: str, view: View, q: View, dtypes: tuple[str, ...]) -> None:
    wanted = (*q.shape[:2], HEAD_DIM_V)
    if view.shape != wanted:
        raise ShapeError(explain(f"{argument}.shape", view.shape, str(wanted)))
    if view.dtype not in dtypes:
        expected = f"{q.dtype}, like q" + (", or float32" if "float32" in dtypes else "")
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, expected, f"convert {argument}"))
    check_contiguous_along_last(argument, view)
    check_device(argument, view, q)


def strided(view: View | None, axes: int) -> Strided:
    """What the launchers need of an array; address 0 for None."""
    return Strided(0, (0,) * axes) if view is None else Strided(view.ptr, view.strides[:axes])
