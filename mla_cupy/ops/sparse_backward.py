"""Sparse attention over a flat latent cache, backward."""

from __future__ import annotations

from typing import Any

from mla_cupy.kernels.sparse_backward import SPARSE_BACKWARD
from mla_cupy.kernels.sparse_backward.problem import SparseBackwardOptions, SparseBackwardProblem
from mla_cupy.ops.call import call
from mla_cupy.ops.checks import check_flag, check_lse_base, check_scale, explains_scale
from mla_cupy.ops.groups import Packed
from mla_cupy.ops.operation import Examined, Input, Operation, Output, Views, like_first_or_float32, present
from mla_cupy.ops.sparse_inputs import (
    INDICES,
    MIN_SIZES,
    OPTIONAL_INPUTS,
    Q_KV,
    SIZES,
    aligned,
    check_selection,
    check_sparse_values,
)


@explains_scale
def sparse_mla_backward(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    indices: Any,
    *,
    scale: float,
    dlse: Any = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: Any = None,
    dq: Any = None,
    dkv: Any = None,
    d_sink: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Compute the gradients of `sparse_mla_forward` with respect to `q`, `kv` and `attn_sink`.

    With P = exp(scale * q . kv[j] - lse_total), lse_total = log(exp(lse) + exp(attn_sink)), dP = dout . kv[j, :512],
    delta = sum(out * dout) and dS = scale * P * (dP - delta):

    dq = dS kv,   dkv = dS^T q + P^T dout (in the first 512 elements),   d_sink = -sum exp(attn_sink - lse_total) delta

    A gradient with respect to `lse` adds scale * exp(scale * q . kv[j] - lse) * dlse to dS.

    Parameters
    ----------
    q, kv, indices : array
        As for the forward.
    out : array, (s_q, h_q, 512), dtype of q or float32
        As the forward returned it.
    dout : array, (s_q, h_q, 512), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : array, (s_q, h_q), float32
        As the forward returned it, without the sink. Both infinities mark a query and head without a row. Neither
        these, nor queries that select no row, nor rows with an lse of 1.2e7 or more in magnitude have a gradient:
        float32 no longer resolves the weights of the latter.
    dlse : array, (s_q, h_q), float32, optional
        Gradient with respect to `lse` in its base, for a loss on `lse` or for a merge of partial results. It has no
        influence on `d_sink`.
    scale, topk_length, attn_sink, causal, relative, packed, lse_base
        As for the forward.
    deterministic : bool
        Make the results bitwise reproducible: see the notes.
    dkv_dtype : str or dtype, optional
        "float32" for gradients to be added up; default: the dtype of `dkv`, or of kv.
    dq : array, shape and dtype of q, optional
        Memory for the gradient: a contiguous last axis, other strides in multiples of 16 bytes. Not for JAX, whose
        arrays cannot be written.
    dkv : array, shape of kv, dtype of kv or float32, optional
        Likewise for kv; any stride between its rows.
    d_sink : array, (h_q,), float32, optional
        Likewise for `attn_sink`; contiguous.
    workspace : array, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(sparse_mla_backward, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    dq : array, shape and dtype of q
        Array of the caller's library.
    dkv : array, shape of kv
        0 in rows that no query selects.
    d_sink : array, (h_q,), float32, or None
        None without `attn_sink`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `dq` and `dkv` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.
    A query and the rows that it does not select have no influence on each other's gradients, whatever they contain.

    `dq` and `d_sink` are the same in every run. `dkv` is accumulated in float32, in an order that varies, so its last
    bits may differ from run to run before it is rounded. `deterministic=True` rounds each number before it is added, so
    coarsely that float32 holds every sum exactly, in any order. The rounding error grows with the number of times that
    a row is selected, times the additions per selection; at 4096 of them it is 0.2 % of `dkv` on random data, about as
    much as rounding to bfloat16. Every addition may also lose an absolute 2^-42 * n * a * c: n is how often the row is
    selected, a the additions per selection (one per block of heads), and c a bound on one query's contribution to an
    element. The page of `cuda_src/sparse_backward` has c and the derivation. The bits are guaranteed only if `lse` is
    the forward's.

    What `dlse` adds to dS is computed as P * exp(lse_total - lse) * dlse. It is lost where a sink takes so much of the
    weight that P underflows (bfloat16: below 1e-38; float16 on Hopper, where P has 16 bits: below 3e-8). The factor is
    limited to 2^100: where a sink is more than 69 above `lse`, what `dlse` adds is too small.

    `dq` and `dkv` are lost in the same place: P and dS, which includes `scale`, have 16 bits on the tensor cores. In
    float16 magnitudes below 3e-8 become 0, and a dS above 65,504 becomes infinite. A row with a sink 18 or more above
    its scores has a `dq` of 0, whatever `dout` is; from 10 on it has fewer digits. bfloat16 keeps such rows, as does
    kernel="sparse_backward_generic", which computes in float32.

    A head with a sink of +inf contributes nothing to `dq` and `dkv`, with or without `dlse`. Its `d_sink` is 0 for the
    forward's `out`, which is 0. A sink of -inf is no sink; its `d_sink` is 0.

    Workspace: 4 * s_kv * d_qk bytes for the sums, six times as much if deterministic, 4 * s_q * topk for the lists of
    rows, 8 * s_q * h_q for the statistics; on Hopper up to 4 * h_q * (d_qk + 1) per SM, at most 20 MB, for partial dq
    of the last queries. A call takes 2 * h_q * (3 * d_qk + 2 * 512) FLOPs per selected row.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((2, 16, 576), np.float16)
    >>> kv = np.ones((100, 576), np.float16)
    >>> indices = np.array([[3, 70, -1], [5, -1, -1]], np.int32)
    >>> out, lse, _ = mla_cupy.sparse_mla_forward(q, kv, indices, scale=192**-0.5)
    >>> dout = np.ones_like(out)
    >>> dq, dkv, d_sink = mla_cupy.sparse_mla_backward(q, kv, out, dout, lse, indices, scale=192**-0.5)
    >>> dq.shape, float(dkv[3, 0]), float(dkv[5, 0]), float(dkv[4, 0]), d_sink
    ((2, 16, 576), 8.0, 16.0, 0.0, None)
    """
    return call(sparse_mla_backward, locals())


def _examine(views: Views, given: SparseBackwardOptions) -> Examined:
    sizes = check_selection(views)
    options = given._replace(
        scale=check_scale(given.scale),
        causal=check_flag("causal", given.causal),
        relative=check_flag("relative", given.relative),
        lse_base=check_lse_base(given.lse_base),
        deterministic=check_flag("deterministic", given.deterministic),
    )
    problem = SparseBackwardProblem(
        *sizes,
        has_sink=views["attn_sink"] is not None,
        deterministic=options.deterministic,
        aligned=aligned(views, "q", "kv", "dout"),
        aligned_out=present(views, "out").dtype != "float32" and aligned(views, "out"),
        has_dlse=views["dlse"] is not None,
    )
    return Examined(problem, options)


def _dtype_of_q(first: str) -> tuple[str, ...]:
    return (first,)


OPERATION = Operation(
    "sparse_mla_backward",
    inputs=(
        *Q_KV,
        Input("out", "s_q h_q d_v", ("=q", "float32"), contiguous=True),
        Input("dout", "s_q h_q d_v", ("=q",), contiguous=True),
        Input("lse", "s_q h_q", ("float32",)),
        INDICES,
        *OPTIONAL_INPUTS,
        Input("dlse", "s_q h_q", ("float32",), optional=True),
    ),
    outputs=(
        Output("dq", "s_q h_q d_qk", _dtype_of_q, layout="wide"),
        Output("dkv", "s_kv d_qk", like_first_or_float32, "dkv_dtype", "rows", like="kv"),
        Output("d_sink", "h_q", layout="rows", needs="attn_sink"),
    ),
    sizes=SIZES,
    min_sizes=MIN_SIZES,
    options=SparseBackwardOptions,
    parallel={"h_q": ()},
    examine=_examine,
    check_values=check_sparse_values,
    pipeline=SPARSE_BACKWARD,
    groups={"packed": Packed},
)
