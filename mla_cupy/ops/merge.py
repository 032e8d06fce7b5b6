"""Merging partial attention results."""

from __future__ import annotations

import math
from typing import Any

from mla_cupy.dtypes import FLOATS, HALF
from mla_cupy.kernels.merge import MERGE
from mla_cupy.kernels.merge.pipeline import MergeOptions, MergeProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_lse
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, present


def merge_states(
    outs: Any,
    lses: Any,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
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
        Memory for the result; the last axis is contiguous.
    lse : array, (b, h_q, s_q), float32, optional
        Memory for the merged log-sum-exp; any strides.
    workspace : array, (n,), uint8, optional
        Unused: `workspace_bytes(merge_states, ...)` is 0.
    out_dtype : str or dtype, optional
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
    return call(merge_states, locals())


def _out_dtypes(first: str) -> tuple[str, ...]:
    """Float32 states become anything; 16-bit states stay, or become float32."""
    return (first, "float32") if first in HALF else ("float32", *HALF)


def _examine(views: Views, given: MergeOptions) -> Examined:
    options = given._replace(**check_lse(given.lse_base, given.empty_lse)._asdict())
    return Examined(MergeProblem(present(views, "outs").dtype), options)


OPERATION = Operation(
    "merge_states",
    inputs=(
        Input("outs", "n b s_q h_q d", FLOATS, contiguous=True),
        Input("lses", "n b h_q s_q", ("float32",)),
    ),
    outputs=(
        Output("out", "b s_q h_q d", _out_dtypes, "out_dtype", "rows"),
        Output("lse", "b h_q s_q"),
    ),
    min_sizes={"n": 1, "d": 1},
    options=MergeOptions,
    parallel={"b": (), "s_q": (), "h_q": ()},
    examine=_examine,
    pipeline=MERGE,
)
