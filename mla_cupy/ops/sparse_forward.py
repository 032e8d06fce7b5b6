"""Sparse attention over a flat latent cache, forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mla_cupy import arrays
from mla_cupy.arrays import Native, View
from mla_cupy.launchers.decode_problem import HEAD_DIM_V
from mla_cupy.launchers.sparse_forward_problem import SparseForwardProblem
from mla_cupy.launchers.sparse_forward_sequence import (
    SparseForwardFlags,
    SparseForwardPointers,
    check_variant,
    sequence,
)
from mla_cupy.ops import backend
from mla_cupy.ops.checks import check_empty_lse, check_float32, check_result, check_writable, steps_by_16_bytes
from mla_cupy.ops.sparse_checks import (
    SparseViews,
    check_sparse_inputs,
    check_sparse_scalars,
    check_sparse_values,
    resolve_scale,
)

LOG2_E = math.log2(math.e)


def sparse_mla_forward(
    q: Any,
    kv: Any,
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
    empty_lse: float = -math.inf,
    out: Any = None,
    lse: Any = None,
    max_logits: Any = None,
    out_dtype: str | None = None,
    variant: str | None = None,
    check: bool = False,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Attend from each query to the rows of a latent cache that its indices select (absorbed MLA).

    out[i, h] = w[i, h] * sum_j softmax_j(scale * q[i, h] . kv[j]) * kv[j, :512], where j runs over the rows that
    query i selects, and w[i, h] = 1 / (1 + exp(attn_sink[h] - lse[i, h])); without a sink, w is 1.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
        Absorbed queries, d_qk 576 or 512. The last axis is contiguous; other strides are free (multiples of 16 bytes
        are fastest).
    kv : array, (s_kv, d_qk) or (s_kv, 1, d_qk), dtype of q
        Latents; the values are the first 512 elements of the keys. Strides as for q.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        The rows of each query, counted from the start of its sequence, in any order. Any topk, any strides. A slot
        counts if 0 <= index < limit; all others are skipped, -1 being the usual mark. The limit is the sequence's
        length in kv. An index that stands twice counts twice.
    d_v : int
        Width of the values: 512.
    scale : float, optional
        Factor of the scores: finite, above 0. Default: d_qk**-0.5.
    topk_length : array, (s_q,), int32, optional
        Only the first topk_length[i] slots of query i are read; clamped to [0, topk].
    attn_sink : array, (h_q,), float32, optional
        Logits of a key without a value: see w above. -inf has no effect, +inf makes `out` 0.
    causal : bool
        Lower the limit of each query by the number of queries of its sequence that come after it: of as many queries
        as rows, query i sees rows 0 to i.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Sequence n has the queries from cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the rows from cu_seqlens_kv[n] to
        cu_seqlens_kv[n + 1]. A query of no sequence has no row. Both or none; default: one sequence.
    lse_base : str
        "e" or "2": base of the logarithm in `lse`.
    empty_lse : float
        `lse` of a query without a row; its `out` is 0, its `max_logits` -inf.
    out : array, (s_q, h_q, 512), dtype of q or float32, optional
        Where the result goes. Not for JAX, whose arrays cannot be written.
    lse, max_logits : array, (s_q, h_q), float32, optional
        Where they go.
    out_dtype : str, optional
        "float32" for results to be merged; default: the dtype of `out`, or of q.
    variant : str, optional
        Name of the attention kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    check : bool
        Look at the values of `indices`, `topk_length` and `cu_seqlens` first, which synchronises: the first that is
        neither a row within the limit nor -1 is an error.
    stream : int or stream object, optional
        Where to run. Default: the caller's library's current stream.

    Returns
    -------
    out : array, (s_q, h_q, 512)
        Of the caller's library.
    lse : array, (s_q, h_q), float32
        log(sum_j exp(scale * q . kv[j])), in base `lse_base`, without the sink. The backward takes it.
    max_logits : array, (s_q, h_q), float32
        max_j scale * q . kv[j].

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and `out`, `lse` and `max_logits` are untouched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    NumPy arrays (and PyTorch tensors on the CPU) are computed on the GPU if there is one, else by the NumPy oracle.
    Rows that a query does not select never reach its result, whatever they hold: NaN, Inf, or memory that is not
    there. The result does not change from run to run; it depends on how the queries are split over the GPU, that is
    on s_q and on the other queries' numbers of rows, within rounding. Workspace: 4 * s_q * topk bytes for the lists of
    rows, and the pieces of split queries. It takes 2 * h_q * (d_qk + 512) FLOPs for each selected row.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> q = np.ones((2, 16, 576), np.float16)
    >>> kv = np.ones((100, 576), np.float16)
    >>> indices = np.array([[3, 70, -1], [5, -1, -1]], np.int32)
    >>> out, lse, max_logits = mla_cupy.sparse_mla_forward(q, kv, indices)
    >>> out.shape, float(out[0, 0, 0]), round(float(lse[0, 0]), 3), float(max_logits[1, 0])
    ((2, 16, 512), 1.0, 24.693, 24.0)
    """
    inputs = {
        "q": q,
        "kv": kv,
        "indices": indices,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }
    results = {"out": out, "lse": lse, "max_logits": max_logits}
    family = arrays.common_family({**inputs, **results}, optional=_NAMES[_REQUIRED:])
    check_writable(family, results)
    arrays.check_stream(family, stream)
    check_sparse_scalars(d_v, scale, lse_base)
    check_variant(variant)
    options = _Options(scale, causal, out_dtype, lse_base, check_empty_lse(empty_lse), variant, check)
    arguments = _Arguments(*(None if x is None else family.adopt(x) for x in (*inputs.values(), *results.values())))
    run = _forward_on_gpu if family.on_gpu else _forward_on_host
    made = run(family.native, arguments, options, stream)
    out, lse, max_logits = (
        family.release(x) if given is None else given for x, given in zip(made, results.values(), strict=True)
    )
    return out, lse, max_logits


class _Arguments(NamedTuple):
    """Arrays of a native family."""

    q: Any
    kv: Any
    indices: Any
    topk_length: Any
    attn_sink: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    out: Any
    lse: Any
    max_logits: Any


_NAMES = _Arguments._fields
_REQUIRED, _INPUTS = 3, 7  # of the arguments; the results follow


class _Options(NamedTuple):
    """What, with the arrays, makes a call."""

    scale: float | None
    causal: bool
    out_dtype: str | None
    lse_base: str
    empty_lse: float
    variant: str | None
    check: bool

    def flags(self, q: View, out_dtype: str) -> SparseForwardFlags:
        return SparseForwardFlags(
            out_dtype == "float32",
            resolve_scale(self.scale, q) * LOG2_E,
            math.log(2) if self.lse_base == "e" else 1.0,
            self.empty_lse,
        )


def _check(native: Native, arguments: _Arguments, options: _Options) -> tuple[SparseViews, str]:
    """Check everything; returns the inputs, seen from outside, and the dtype of `out`."""
    given = [None if x is None else native.view(x) for x in arguments]
    views = check_sparse_inputs(SparseViews(*given[:_INPUTS]))  # type: ignore[arg-type]
    out, lse, max_logits = given[_INPUTS:]
    s_q, h_q, _ = views.q.shape
    out_dtype = check_result("out", out, (s_q, h_q, HEAD_DIM_V), views.q, "q", options.out_dtype)
    check_float32("lse", lse, (s_q, h_q), views.q)
    check_float32("max_logits", max_logits, (s_q, h_q), views.q)
    return views, out_dtype


def _forward_on_gpu(native: Native, arguments: _Arguments, options: _Options, stream: Any) -> tuple[Any, Any, Any]:
    """Check, allocate what is missing, enqueue."""
    views, out_dtype = _check(native, arguments, options)
    q, kv = views.q, views.kv
    (s_q, h_q, d_qk), device = q.shape, q.device
    aligned = steps_by_16_bytes(q) and steps_by_16_bytes(kv)
    kernels = sequence(SparseForwardProblem(h_q, d_qk, q.dtype, aligned), device, options.variant)
    handle = native.current_stream(device) if stream is None else arrays.stream_handle(stream)
    if options.check:
        check_sparse_values(native, arguments._asdict(), kv.shape[0], options.causal, handle)
    kernels.bind(handle)  # what can fail does so before anything is allocated or enqueued

    out, lse, max_logits = arguments[_INPUTS:]
    if out is None:
        out = native.empty((s_q, h_q, HEAD_DIM_V), out_dtype, device, handle)
    if lse is None:
        lse = native.empty((s_q, h_q), "float32", device, handle)
    if max_logits is None:
        max_logits = native.empty((s_q, h_q), "float32", device, handle)
    if s_q > 0:
        pointers = _pointers(views, *map(native.view, (out, lse, max_logits)))
        selection = views.selection(options.causal)
        scratch = native.empty((kernels.workspace_bytes(s_q, selection.topk),), "uint8", device, handle)
        flags = options.flags(q, out_dtype)
        kernels.execute(pointers, selection, flags, native.view(scratch).ptr, handle)
    return out, lse, max_logits


def _pointers(views: SparseViews, out: View, lse: View, max_logits: View) -> SparseForwardPointers:
    q, kv, sink = views.q, views.kv, views.attn_sink
    return SparseForwardPointers(
        q.ptr,
        kv.ptr,
        0 if sink is None else sink.ptr,
        out.ptr,
        lse.ptr,
        max_logits.ptr,
        q.strides[:2],
        kv.strides[0],
        0 if sink is None else sink.strides[0],
        out.strides[:2],
        lse.strides,
        max_logits.strides,
    )


def _forward_on_host(native: Native, arguments: _Arguments, options: _Options, stream: Any) -> tuple[Any, ...]:
    """NumPy arrays: on the GPU and back, or by the oracle."""
    views, out_dtype = _check(native, arguments, options)
    made: Sequence[Any]
    if backend.use_gpu():
        inputs = dict(zip(_NAMES, backend.sent(arguments[:_INPUTS], None, stream), strict=False))
        on_gpu = _Arguments(**inputs, out=None, lse=None, max_logits=None)
        results = _forward_on_gpu(arrays.cupy_family(), on_gpu, options._replace(out_dtype=out_dtype), stream)
        made = backend.fetched(results, stream)
    else:
        if options.check:
            check_sparse_values(native, arguments._asdict(), views.kv.shape[0], options.causal, 0)
        answer = backend.reference_sparse_forward(
            *arguments[:_REQUIRED],
            **dict(zip(_NAMES[_REQUIRED:_INPUTS], arguments[_REQUIRED:_INPUTS], strict=True)),
            scale=options.scale,
            causal=options.causal,
            lse_base=options.lse_base,
            empty_lse=options.empty_lse,
        )
        made = backend.rounded(answer, (out_dtype, "float32", "float32"))
    return backend.deliver(made, arguments[_INPUTS:], _NAMES[_INPUTS:])
