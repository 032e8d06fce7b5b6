"""The halves of kv_b_proj around decode: W_UK before it, merge and W_UV after it."""

from __future__ import annotations

import math
from typing import Any

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import FLOATS, HALF
from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.kernels.projection import ABSORBING, MERGE_PROJECT
from mla_cupy.kernels.projection.pipeline import MAX_STATES, AbsorbOptions, MergeProjectOptions, ProjectProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_lse
from mla_cupy.ops.operation import (
    Examined,
    Input,
    Operation,
    Output,
    Views,
    like_first_or_float32,
    only_like_first,
    present,
)
from mla_cupy.shapes import D_HEADS, D_QK, D_ROPE, D_V, MAX_INT32

W_UV = Input("w_uv", "h_q d_head d_v", HALF, optional=True, wide=True)
GATE = Input("gate", "b s_q h_q d_head", HALF, optional=True, wide=True)


def absorb(
    q_nope: Any, w_uk: Any, *, q_rope: Any = None, out: Any = None, workspace: Any = None, stream: Any = None
) -> Any:
    """Multiply queries by W_UK, which gives decode's absorbed queries: q[t, h] = q_nope[t, h] w_uk[h].

    Parameters
    ----------
    q_nope : array, (t, h_q, d_nope), bfloat16 or float16
        The part of the queries without RoPE; d_nope is 64, 128, 192 or 256. The last axis is contiguous; the start and
        the other strides are multiples of 16 bytes. The first columns of whole queries qualify.
    w_uk : array, (h_q, d_nope, 512), dtype of q_nope
        The keys' half of kv_b_proj, as stored in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, :d_nope]`. Strides as
        for q_nope.
    q_rope : array, (t, h_q, 64), dtype of q_nope, optional
        The RoPE part of the queries; it becomes the last columns of the result. Strides as for q_nope.
    out : array, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`, dtype of q_nope, optional
        Memory for the result, strides as for q_nope. It may be the first 512 columns of queries whose RoPE columns were
        turned in place.
    workspace : array, (n,), uint8, optional
        None is needed.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    array, (t, h_q, 512), or (t, h_q, 576) with a `q_rope`
        Reshape it to (b, s_q, h_q, ...) for decode.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Meant for the few tokens of a decode step: the weights are read once, whatever the number of tokens, and that takes
    most of the time. With many tokens a batched matrix product is faster: "Around attention" in the documentation has
    the threshold. Terms are added in float32. Deterministic. 2 * t * h_q * d_nope * 512 FLOPs.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q_nope, kv_b_proj = np.ones((2, 4, 128), np.float16), np.ones((4 * 256, 512), np.float16)
    >>> w_uk = kv_b_proj.reshape(4, 256, 512)[:, :128]
    >>> q = mla_cupy.absorb(q_nope, w_uk, q_rope=np.zeros((2, 4, 64), np.float16))
    >>> q.shape, float(q[1, 3, 511]), float(q[1, 3, 512])
    ((2, 4, 576), 128.0, 0.0)
    """
    return call(absorb, locals())


def merge_project(
    outs: Any,
    w_uv: Any,
    *,
    lses: Any = None,
    gate: Any = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Merge n partial results of the same queries, and multiply the result by W_UV and by the sigmoid of a gate.

    merged, lse = merge_states(outs, lses)
    out[b, s, h, d] = sum_c merged[b, s, h, c] * w_uv[h, d, c] * sigmoid(gate[b, s, h, d])

    Parameters
    ----------
    outs : array, (n, b, s_q, h_q, 512), bfloat16, float16 or float32
        Partial results as for `merge_states`, n up to 256. The last axis is contiguous; the start and the other strides
        are multiples of 16 bytes.
    w_uv : array, (h_q, d_head, 512), bfloat16 or float16
        The values' half of kv_b_proj, as stored in the weights: `kv_b_proj.reshape(h_q, -1, 512)[:, d_nope:]`; d_head
        is 64, 128, 192 or 256. Strides as for outs.
    lses : array, (n, b, h_q, s_q), float32, optional
        Log-sum-exps of `outs`, as for `merge_states`. Optional for n = 1.
    gate : array, (b, s_q, h_q, d_head), dtype of w_uv, optional
        Argument of the sigmoid. Strides as for outs.
    lse_base : str
        "e" or "2": base of `lses` and of the result.
    empty_lse : float
        `lse` of a row that is empty in all states; its `out` is 0.
    out : array, (b, s_q, h_q, d_head), optional
        Memory for the result; strides as for outs.
    lse : array, (b, h_q, s_q), float32, optional
        Memory for its log-sum-exp; any strides.
    workspace : array, (n,), uint8, optional
        None is needed.
    out_dtype : str or dtype, optional
        The dtype of w_uv or "float32". Default: the dtype of `out`, or of w_uv.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (b, s_q, h_q, d_head)
    lse : array, (b, h_q, s_q), float32
        None without `lses`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    `w_uv` has the dtype of `outs` unless `outs` is float32.

    `mla_decode` and `sparse_mla_decode` do the same with their own results if `project` is passed. Merged results are
    rounded to the dtype of w_uv before the product, and its terms are added in float32. The weights are read once,
    whatever the number of tokens; with many tokens a batched matrix product is faster: see "Around attention" in the
    documentation. Deterministic.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> outs, w_uv = np.ones((1, 2, 1, 4, 512), np.float16), np.full((4, 128, 512), 0.5, np.float16)
    >>> out, lse = mla_cupy.merge_project(outs, w_uv, gate=np.zeros((2, 1, 4, 128), np.float16))
    >>> out.shape, float(out[1, 0, 3, 127]), lse
    ((2, 1, 4, 128), 128.0, None)
    """
    return call(merge_project, locals())


def check_projection(views: Views, dtype: str) -> int:
    """Check `w_uv` and `gate` of an attention with results of this 16-bit dtype; the width of a head, 0 without.

    Raises
    ------
    DTypeError, ArgumentError
    """
    w_uv, gate = views["w_uv"], views["gate"]
    if w_uv is None:
        if gate is not None:
            raise ArgumentError(explain("gate", "an array", "None without a w_uv"))
        return 0
    _check_like(w_uv, "w_uv", dtype)
    if gate is not None:
        _check_like(gate, "gate", dtype)
    return w_uv.shape[1]


def _check_like(view: View, argument: str, dtype: str) -> None:
    if view.dtype != dtype:
        raise DTypeError(explain(f"{argument}.dtype", view.dtype, dtype, f"convert {argument}"))


def _examine_merge(views: Views, given: MergeProjectOptions) -> Examined:
    options = given._replace(**check_lse(given.lse_base, given.empty_lse)._asdict())
    outs, w_uv = present(views, "outs"), present(views, "w_uv")
    n, b, s_q, h_q, _ = outs.shape
    check_projection(views, w_uv.dtype)
    if n > MAX_STATES:
        raise ShapeError(explain("outs.shape[0]", n, f"at most {MAX_STATES}", "merge some with merge_states first"))
    if b * s_q > MAX_INT32:
        raise ShapeError(explain("outs.shape", outs.shape, f"at most {MAX_INT32} tokens"))
    if outs.dtype in HALF and outs.dtype != w_uv.dtype:
        raise DTypeError(explain("w_uv.dtype", w_uv.dtype, f"{outs.dtype}, like outs", "convert w_uv"))
    if views["lses"] is None and n != 1:
        raise ArgumentError(explain("lses", None, f"an array, with n={n} states", "lses may be omitted only for n = 1"))
    return Examined(ProjectProblem(h_q, w_uv.shape[1], w_uv.dtype, b * s_q), options)


def _examine_absorb(views: Views, options: AbsorbOptions) -> Examined:
    q_nope = present(views, "q_nope")
    t, h_q, d_nope = q_nope.shape
    sizes = {"d_qk": D_V if views["q_rope"] is None else D_QK}
    return Examined(ProjectProblem(h_q, d_nope, q_nope.dtype, t), options, sizes)


ABSORB_OPERATION = Operation(
    "absorb",
    inputs=(
        Input("q_nope", "t h_q d_nope", HALF, wide=True),
        Input("w_uk", "h_q d_nope d_v", ("=q_nope",), wide=True),
        Input("q_rope", "t h_q d_rope", ("=q_nope",), optional=True, wide=True),
    ),
    outputs=(Output("out", "t h_q d_qk", only_like_first, layout="wide"),),
    sizes={"d_nope": D_HEADS, "d_v": (D_V,), "d_rope": (D_ROPE,), "d_qk": (D_QK, D_V)},
    min_sizes={"h_q": 1},
    options=AbsorbOptions,
    examine=_examine_absorb,
    pipeline=ABSORBING,
)

MERGE_OPERATION = Operation(
    "merge_project",
    inputs=(
        Input("outs", "n b s_q h_q d_v", FLOATS, wide=True),
        Input("w_uv", "h_q d_head d_v", HALF, wide=True),
        Input("lses", "n b h_q s_q", ("float32",), optional=True),
        GATE,
    ),
    outputs=(
        Output("out", "b s_q h_q d_head", like_first_or_float32, "out_dtype", "wide", dtype_of="w_uv"),
        Output("lse", "b h_q s_q", needs="lses"),
    ),
    sizes={"d_head": D_HEADS, "d_v": (D_V,)},
    min_sizes={"n": 1, "h_q": 1},
    options=MergeProjectOptions,
    examine=_examine_merge,
    pipeline=MERGE_PROJECT,
)
