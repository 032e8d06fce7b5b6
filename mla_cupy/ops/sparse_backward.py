"""Sparse attention over a flat latent cache, backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mla_cupy import arrays
from mla_cupy.arrays import Native
from mla_cupy.launchers.decode_problem import HEAD_DIM_V
from mla_cupy.launchers.sparse_backward_config import check_variant
from mla_cupy.launchers.sparse_backward_sequence import BackwardFlags, BackwardPointers, sequence
from mla_cupy.launchers.sparse_problem import SparseBackwardProblem
from mla_cupy.ops import backend
from mla_cupy.ops.checks import check_writable, steps_by_16_bytes
from mla_cupy.ops.sparse_backward_checks import BackwardViews, check_backward, strided
from mla_cupy.ops.sparse_checks import check_sparse_scalars, check_sparse_values, resolve_scale

LOG2_E = math.log2(math.e)


def sparse_mla_backward(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    indices: Any,
    *,
    d_v: int = HEAD_DIM_V,
    scale: float | None = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: str | None = None,
    dq: Any = None,
    dkv: Any = None,
    variant: str | None = None,
    check: bool = False,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Gradients of `sparse_mla_forward` with respect to `q`, `kv` and `attn_sink`.

    With P = exp(scale * q . kv[j] - lse_total), lse_total = log(exp(lse) + exp(attn_sink)), dP = dout . kv[j, :512],
    delta = sum(out * dout) and dS = scale * P * (dP - delta):

    dq = dS kv,   dkv = dS^T q + P^T dout (in the first 512 elements),   d_sink = -sum exp(attn_sink - lse_total) delta

    Parameters
    ----------
    q, kv, indices : array
        As for the forward.
    out : array, (s_q, h_q, 512), dtype of q or float32
        As the forward returned it.
    dout : array, (s_q, h_q, 512), dtype of q
        Gradient with respect to `out`. The last axes of both are contiguous.
    lse : array, (s_q, h_q), float32
        As the forward returned it, without the sink. Both infinities mark a query and head without a row: it has no
        gradient.
    d_v, scale, topk_length, attn_sink, causal, cu_seqlens_q, cu_seqlens_kv, lse_base
        As for the forward.
    deterministic : bool
        Make every bit of the results the same in every run: see the notes.
    dkv_dtype : str, optional
        "float32" for gradients to be added up; default: the dtype of `dkv`, or of kv.
    dq : array, shape and dtype of q, optional
        Where the gradient goes: a contiguous last axis, other steps of multiples of 16 bytes. Not for JAX, whose
        arrays cannot be written.
    dkv : array, shape of kv, dtype of kv or float32, optional
        The same for kv; any stride between its rows.
    variant : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    check : bool
        Look at the values of `indices`, `topk_length` and `cu_seqlens` first, which synchronises.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    dq : array, shape and dtype of q
        Of the caller's library.
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
    Rows that a query does not select never reach its gradient, whatever they hold, and it never reaches theirs.

    `dq` and `d_sink` do not change from run to run. `dkv` is added up in float32 in whatever order the GPU comes to it,
    so that it changes in the last bits of float32 before it is rounded. With `deterministic` each number is rounded
    before it is added, to so few bits that float32 holds every sum exactly, in any order; there are six sums for each
    element, for numbers of different sizes. Let n be the slots that select a row, and a the additions for each of them
    (h_q / 64 on Hopper, h_q / 8 by the generic kernel, rounded up). A number is then rounded by at most the larger of
    2^-19 n a x and 2^-42 n a c, where x is the largest of the two (on Hopper: four) neighbours that are added together,
    and c the most that a query can add,

    c = max_i sum_h (max|dout| + scale * (|dout| * max_j |kv[j, :512]| + |delta|) * max|q|),

    with |.| for the Euclidean norm. These errors have both signs: with n a = 4096 they come to 0.2 % of `dkv` on random
    data, about as much as a rounding to bfloat16, and they grow with n a. Bits may differ from run to run after all if
    `lse` is not the forward's, which makes P larger than 1.

    Workspace: 4 * s_kv * d_qk bytes for the sums, six times that if deterministic, 4 * s_q * topk for the lists of
    rows, 8 * s_q * h_q for the statistics. It takes 2 * h_q * (3 * d_qk + 2 * 512) FLOPs for each selected row.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((2, 16, 576), np.float16)
    >>> kv = np.ones((100, 576), np.float16)
    >>> indices = np.array([[3, 70, -1], [5, -1, -1]], np.int32)
    >>> out, lse, _ = mla_cupy.sparse_mla_forward(q, kv, indices)
    >>> dq, dkv, d_sink = mla_cupy.sparse_mla_backward(q, kv, out, np.ones_like(out), lse, indices)
    >>> dq.shape, float(dkv[3, 0]), float(dkv[5, 0]), float(dkv[4, 0]), d_sink
    ((2, 16, 576), 8.0, 16.0, 0.0, None)
    """
    inputs = {
        "q": q,
        "kv": kv,
        "out": out,
        "dout": dout,
        "lse": lse,
        "indices": indices,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }
    results = {"dq": dq, "dkv": dkv}
    family = arrays.common_family({**inputs, **results}, optional=_NAMES[_REQUIRED:])
    check_writable(family, results)
    arrays.check_stream(family, stream)
    check_sparse_scalars(d_v, scale, lse_base)
    check_variant(variant)
    options = _Options(scale, causal, lse_base, deterministic, dkv_dtype, variant, check)
    arguments = _Arguments(*(None if x is None else family.adopt(x) for x in (*inputs.values(), *results.values())))
    run = _backward_on_gpu if family.on_gpu else _backward_on_host
    made_dq, made_dkv, d_sink = run(family.native, arguments, options, stream)
    return (
        dq if dq is not None else family.release(made_dq),
        dkv if dkv is not None else family.release(made_dkv),
        None if d_sink is None else family.release(d_sink),
    )


class _Arguments(NamedTuple):
    """Arrays of a native family."""

    q: Any
    kv: Any
    out: Any
    dout: Any
    lse: Any
    indices: Any
    topk_length: Any
    attn_sink: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    dq: Any
    dkv: Any


_NAMES = _Arguments._fields
_REQUIRED, _INPUTS = 6, 10  # of the arguments; the results follow


class _Options(NamedTuple):
    """What, with the arrays, makes a call."""

    scale: float | None
    causal: bool
    lse_base: str
    deterministic: bool
    dkv_dtype: str | None
    variant: str | None
    check: bool


def _check(native: Native, arguments: _Arguments, options: _Options) -> BackwardViews:
    given = {name: None if x is None else native.view(x) for name, x in arguments._asdict().items()}
    return check_backward(given, options.dkv_dtype)


def _backward_on_gpu(native: Native, arguments: _Arguments, options: _Options, stream: Any) -> tuple[Any, Any, Any]:
    """Check, allocate what is missing, enqueue."""
    checked = _check(native, arguments, options)
    q, kv, indices = checked.inputs[:3]
    (s_q, h_q, d_qk), (s_kv, _), device = q.shape, kv.shape, q.device
    problem = SparseBackwardProblem(
        s_q,
        s_kv,
        h_q,
        indices.shape[1],
        d_qk,
        q.dtype,
        has_sink=checked.inputs.attn_sink is not None,
        deterministic=bool(options.deterministic),
        aligned=all(map(steps_by_16_bytes, (q, kv, checked.dout))),
    )
    kernels = sequence(problem, device, options.variant)
    handle = native.current_stream(device) if stream is None else arrays.stream_handle(stream)
    if options.check:
        check_sparse_values(native, arguments._asdict(), s_kv, options.causal, handle)
    kernels.bind(handle)  # what can fail does so before anything is allocated or enqueued

    dq, dkv, dq_view, dkv_view = arguments.dq, arguments.dkv, checked.dq, checked.dkv
    if dq_view is None:
        dq = native.empty(q.shape, q.dtype, device, handle)
        dq_view = native.view(dq)
    if dkv_view is None:
        dkv = native.empty(checked.kv_shape, checked.dkv_dtype, device, handle)
        dkv_view = native.view(dkv)
    d_sink = None if checked.inputs.attn_sink is None else native.empty((h_q,), "float32", device, handle)
    pointers = BackwardPointers(
        strided(q, 2),
        strided(kv, 1),
        strided(checked.out, 2),
        strided(checked.dout, 2),
        strided(checked.lse, 2),
        strided(checked.inputs.attn_sink, 1),
        strided(dq_view, 2),
        strided(dkv_view, 1),
        0 if d_sink is None else native.view(d_sink).ptr,
    )
    scale = resolve_scale(options.scale, q)
    flags = BackwardFlags(
        scale,
        scale * LOG2_E,
        LOG2_E if options.lse_base == "e" else 1.0,
        checked.out.dtype == "float32",
        checked.dkv_dtype == "float32",
    )
    scratch = native.empty((kernels.workspace_bytes,), "uint8", device, handle)  # held to the end
    kernels.execute(pointers, checked.inputs.selection(options.causal), flags, native.view(scratch).ptr, handle)
    return dq, dkv, d_sink


def _backward_on_host(native: Native, arguments: _Arguments, options: _Options, stream: Any) -> tuple[Any, ...]:
    """NumPy arrays: on the GPU and back, or by the oracle."""
    checked = _check(native, arguments, options)
    made: Sequence[Any]
    if backend.use_gpu():
        inputs = dict(zip(_NAMES, backend.sent(arguments[:_INPUTS], None, stream), strict=False))
        on_gpu = _Arguments(**inputs, dq=None, dkv=None)
        options = options._replace(dkv_dtype=checked.dkv_dtype)
        made = backend.fetched(_backward_on_gpu(arrays.cupy_family(), on_gpu, options, stream), stream)
    else:
        if options.check:
            check_sparse_values(native, arguments._asdict(), checked.inputs.kv.shape[0], options.causal, 0)
        answer = backend.reference_sparse_backward(
            *arguments[:_REQUIRED],
            **dict(zip(_NAMES[_REQUIRED:_INPUTS], arguments[_REQUIRED:_INPUTS], strict=True)),
            scale=options.scale,
            causal=options.causal,
            lse_base=options.lse_base,
        )
        made = backend.rounded(answer, (checked.inputs.q.dtype, checked.dkv_dtype, "float32"))
    dq, dkv = backend.deliver(made[:2], (arguments.dq, arguments.dkv), ("dq", "dkv"))
    return dq, dkv, made[2]
