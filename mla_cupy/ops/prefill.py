"""Dense attention with keys and values per head, un-absorbed: prefill and training."""

from __future__ import annotations

from typing import Any

from mla_cupy.dtypes import HALF
from mla_cupy.errors import ShapeError, explain
from mla_cupy.kernels.dense import DENSE
from mla_cupy.kernels.dense.problem import D_ROPE, GEOMETRIES, DenseProblem, PrefillOptions
from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.checks import (
    STARTS,
    check_all_or_none,
    check_flag,
    check_start_values,
    check_starts,
    resolve_scale,
)
from mla_cupy.ops.operation import Arrays, Examined, Input, Operation, Output, Views, like_first_or_float32, present
from mla_cupy.ops.schema import steps_by_16_bytes
from mla_cupy.shapes import MAX_TOKENS

_READ_IN_ROWS = ("q", "q_rope", "k", "k_rope", "v", "state_out")
_WIDTHS_QK = tuple(dict.fromkeys(width for d_qk, _ in GEOMETRIES for width in (d_qk - D_ROPE, d_qk)))
_WIDTHS_V = tuple(dict.fromkeys(d_v for _, d_v in GEOMETRIES))


def mla_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_rope: Any = None,
    k_rope: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    state_out: Any = None,
    state_lse: Any = None,
    causal: bool = True,
    scale: float | None = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    check: bool = False,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend from the queries of each sequence to its keys, with keys and values per head (un-absorbed MLA).

    out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, g]) * v[j, g], where g = h * h_kv // h_q is the KV head of h, and
    j runs over the keys of query i's sequence that it sees.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
        Queries. With `q_rope`, all columns but the last 64. (d_qk, d_v) is (192, 128), (256, 256) or (128, 128). The
        last axis is contiguous; other strides are free (multiples of 16 bytes are fast, on Hopper). So are those of
        `q_rope`, `k`, `k_rope` and `v`.
    k : array, (s_kv, h_kv, d_qk), dtype of q
        Keys. With `k_rope`, all columns but the last 64. h_q is a multiple of h_kv.
    v : array, (s_kv, h_kv, d_v), dtype of q
        Values. Keys and values may be views of one array, such as a projection's (s_kv, h_kv, 128 + 128).
    q_rope : array, (s_q, h_q, 64), dtype of q, optional
        The queries' last columns.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), dtype of q, optional
        The keys' last columns: the same for all heads, or those of each.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys from cu_seqlens_kv[n] to
        cu_seqlens_kv[n + 1]. They are read on the device: clamped to [0, s_q] and [0, s_kv], and one below its
        predecessor is raised to it. A query of no sequence sees no key. Both or none; default: one sequence.
    state_out : array, (s_q, h_q, d_v), dtype of q or float32, optional
        The attention of the same queries to other keys, such as an earlier chunk's. The result is that to all of them.
        It may be `out` itself.
    state_lse : array, (s_q, h_q), float32, optional
        Its log-sum-exps. Both infinities mean that the query saw no key; its `state_out` is then not read. It may be
        `lse` itself.
    causal : bool
        Whether a query is blind to the keys after its own position, the queries being the last of their sequence: query
        i of n sees the first s - n + i + 1 of its s keys.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    out : array, (s_q, h_q, d_v), dtype of q or float32, optional
        Where the result goes. Not for JAX, whose arrays cannot be written.
    lse : array, (s_q, h_q), float32, optional
        Where its log-sum-exp goes, with any strides.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(mla_prefill, ...)` bytes.
    out_dtype : str or dtype, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    kernel : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    check : bool
        Look at the values of `cu_seqlens_q` and `cu_seqlens_kv` first, which synchronises: the first that is out of
        range or below its predecessor is an error.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (s_q, h_q, d_v)
        Of the caller's library; 0 for a query without a key.
    lse : array, (s_q, h_q), float32
        log(sum_j exp(scale * q . k[j])), natural; -inf for a query without a key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out` and `lse` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.

    Nothing is copied or concatenated. What a query does not see never reaches its result, whatever it contains: NaN or
    Inf in later keys and values, or in another sequence's. The result does not change from run to run. Workspace: 32
    bytes for each 128 queries and each sequence, and 20 for each sequence. It takes 2 * h_q * (d_qk + d_v) FLOPs for
    each query and key that it sees.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((3, 4, 192), np.float16)
    >>> kv = np.ones((3, 4, 256), np.float16)  # of a projection
    >>> k_rope = np.ones((3, 64), np.float16)
    >>> out, lse = mla_cupy.mla_prefill(q, kv[..., :128], kv[..., 128:], k_rope=k_rope)
    >>> out.shape, float(out[0, 0, 0]), [round(float(x), 3) for x in lse[:, 0]]
    ((3, 4, 128), 1.0, [13.856, 14.55, 14.955])
    """
    options = (causal, scale, out_dtype, kernel)
    inputs = (q, k, v, q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, state_out, state_lse)
    out, lse = run(Invocation(OPERATION, (*inputs, out, lse), options, workspace, stream, None, check))
    return out, lse


def _examine(views: Views, given: PrefillOptions) -> Examined:
    q, v = present(views, "q"), present(views, "v")
    (s_q, h_q, _), (s_kv, h_kv, d_v) = q.shape, v.shape
    for argument, size in (("q.shape[0]", s_q), ("k.shape[0]", s_kv)):
        if size > MAX_TOKENS:
            raise ShapeError(explain(argument, size, f"at most {MAX_TOKENS}", "the kernels count in int32"))
    d_qk = _check_geometry(views, d_v)
    _check_heads(views, h_q, h_kv)
    check_starts(views)
    check_all_or_none(views, "state_out", "state_lse", expected="an array, as its counterpart")
    starts = views["cu_seqlens_q"]
    aligned = all(steps_by_16_bytes(view) for name in _READ_IN_ROWS if (view := views[name]) is not None)
    sequences = 1 if starts is None else starts.shape[0] - 1
    problem = DenseProblem(s_q, s_kv, h_q, h_kv, d_qk, d_v, q.dtype, sequences, aligned)
    options = given._replace(causal=check_flag("causal", given.causal), scale=resolve_scale(given.scale, d_qk))
    return Examined(problem, options)


def _check_geometry(views: Views, d_v: int) -> int:
    """The width of queries and keys."""
    widths = {}
    for whole in ("q", "k"):
        rope = views[f"{whole}_rope"]
        widths[whole] = present(views, whole).shape[2] + (0 if rope is None else rope.shape[2])
    if widths["q"] != widths["k"]:
        remedy = "the last 64 columns are in q_rope and k_rope, or in q and k"
        raise ShapeError(explain("the width of k", widths["k"], f"{widths['q']}, like q", remedy))
    if (widths["q"], d_v) not in GEOMETRIES:
        built = " or ".join(map(str, GEOMETRIES))
        raise ShapeError(explain("(d_qk, d_v)", (widths["q"], d_v), built, "these are built"))
    return widths["q"]


def _check_heads(views: Views, h_q: int, h_kv: int) -> None:
    if h_q % h_kv:
        raise ShapeError(explain("q.shape[1]", h_q, f"a multiple of h_kv={h_kv}", "each KV head serves as many heads"))
    k_rope = views["k_rope"]
    if k_rope is not None and k_rope.shape[1] not in (1, h_kv):
        raise ShapeError(explain("k_rope.shape[1]", k_rope.shape[1], f"1 or h_kv={h_kv}", "one for all heads, or each"))


def _check_values(arrays: Arrays, options: Any) -> None:
    """Check where the sequences begin.

    Raises
    ------
    ArgumentError
    """
    check_start_values(arrays, len(present(arrays, "q")), len(present(arrays, "k")))


OPERATION = Operation(
    "mla_prefill",
    inputs=(
        Input("q", "s_q h_q d_q", HALF, contiguous=True),
        Input("k", "s_kv h_kv d_k", ("=q",), contiguous=True),
        Input("v", "s_kv h_kv d_v", ("=q",), contiguous=True),
        Input("q_rope", "s_q h_q d_rope", ("=q",), optional=True, contiguous=True),
        Input("k_rope", "s_kv h_rope? d_rope", ("=q",), optional=True, contiguous=True),
        *STARTS,
        Input("state_out", "s_q h_q d_v", ("=q", "float32"), optional=True, contiguous=True),
        Input("state_lse", "s_q h_q", ("float32",), optional=True),
    ),
    outputs=(
        Output("out", "s_q h_q d_v", like_first_or_float32, "out_dtype", "wide", may_be="state_out"),
        Output("lse", "s_q h_q", may_be="state_lse"),
    ),
    sizes={"d_q": _WIDTHS_QK, "d_k": _WIDTHS_QK, "d_v": _WIDTHS_V, "d_rope": (D_ROPE,)},
    min_sizes={"h_q": 1, "h_kv": 1, "b+1": 1},
    options=PrefillOptions,
    examine=_examine,
    check_values=_check_values,
    pipeline=DENSE,
)
