"""The interface of FlashMLA, for arrays of any library that `mla_cupy` supports::

    from mla_cupy.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

It accepts more than FlashMLA: any number of heads, any page size, any `topk`, float16 everywhere, dense decode from an
FP8 cache, and sparse decode from a 16-bit cache. `strict=True` raises an error where FlashMLA does on Hopper, for
engines that probe the limits of a library.

The LSE is natural. A query that sees nothing has an `out` of 0 and an LSE of +inf, as in FlashMLA; `mla_cupy` itself
returns -inf, as do both libraries in `flash_attn_varlen_func`.

This is FlashMLA's interface of September 2026, with `indexer_topk` of its branch nv_dev and `kv_format` of SGLang's
fork. FlashMLA's kernel that fuses the norm and RoPE of queries with attention is not here.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from mla_cupy import dtypes
from mla_cupy.cache_formats import FORMATS, head_axis
from mla_cupy.compat.flash_mla_schedule import FlashMLASchedMeta, Form, form_of, view_of
from mla_cupy.compat.flash_mla_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from mla_cupy.errors import ArgumentError, DTypeError, MlaError, PlanError, ShapeError, explain, kind_of, renamed
from mla_cupy.ops import Fp8, mla_decode, sparse_mla_decode, sparse_mla_forward
from mla_cupy.ops.checks import check_count, check_flag, is_integer
from mla_cupy.shapes import D_V

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

EMPTY_LSE = math.inf
_PAGE_SIZE, _HEADS, _TOPK = 64, (64, 128), 128
"""FlashMLA's own limits on Hopper: `topk` is a multiple of the last."""
_KV_FORMATS = {"V32": "v32", "V32_NO_ROPE": "v32-nope", "V4": "v4", "V41": "v41"}
"""Formats by the names that FlashMLA gives to them."""
_INDEXER_TOPK = (0, 512, 1024, 2048)
"""Numbers of selected keys that FlashMLA is built for."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty schedule for `flash_mla_with_kvcache`; the first call fills it.

    Parameters
    ----------
    *args, **kwargs
        Ignored; older versions of FlashMLA expect the lengths here.

    Returns
    -------
    FlashMLASchedMeta
    None
        Older versions return `num_splits` here.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    kv_format: str | None = None,
    *,
    strict: bool = False,
) -> tuple[Any, Any]:
    """Decode from a paged cache, attending to all tokens or to those that `indices` select.

    Parameters
    ----------
    q : array, (b, s_q, h_q, d_qk), bfloat16 or float16
        d_qk is 576 or 512.
    k_cache : array, (num_blocks, page_size, 1, d_qk) or (num_blocks, 1, page_size, d_qk), dtype of q
        FlashMLA's layout, or FlashInfer's. With `indices` the pages follow one another without gaps. An FP8 cache is
        (..., 656) in the format "v32" with a d_qk of 576; with a d_qk of 512 (..., 584) in "v4" (FlashMLA's MODEL1, or
        V4), (..., 528) in "v41" (its V41), or (..., 656) or, by `kv_format`, (..., 528) in "v32-nope". Its dtype is
        uint8 or float8_e4m3fn, and pages are any multiple of 16 bytes apart. A dense cache in FlashMLA's layout may
        have several KV heads: each runs a separate call for its h_q / h_kv query heads.
    block_table : array, (b, max_pages), int32, or None with `indices`
    cache_seqlens : array, (b,), int32, or None with `indices`
    head_dim_v : int
        512.
    tile_scheduler_metadata : FlashMLASchedMeta
        From `get_mla_metadata`.
    num_splits : None
    softmax_scale : float, optional
        Default: d_qk**-0.5.
    causal : bool
        Query i sees token j iff j <= i + seqlen - s_q. Ignored with `indices`.
    is_fp8_kvcache : bool
        True if `k_cache` is in an FP8 format.
    indices : array, (b, s_q, topk), int32, optional
        Tokens of each query: page * page_size + place in the page. Values outside the cache, such as -1, are skipped.
    attn_sink : array, (h_q,), float32, optional
        With `indices`: see `mla_cupy.sparse_mla_forward`.
    topk_length : array, (b,), int32, optional
        With `indices`: number of each query's indices that count.
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length : array, optional
        With `indices` and an FP8 cache: a second cache in the same format, or (..., 288) in "v41-fp4" (its V41_FP4)
        with "v41", and further tokens, under the same softmax.
    kv_format : str, optional
        Format of an FP8 cache: "V32", "V32_NO_ROPE", "V4" or "V41". Default: by its width; 528 bytes are "V41".
    strict : bool
        Raise an error where FlashMLA does on Hopper: for page sizes other than 64 and an empty batch in dense decode,
        for an FP8 cache without `indices` or `indices` without an FP8 cache, for the format "v41", and for sparse
        decode with other than 64 or 128 heads.

    Returns
    -------
    out : array, (b, s_q, h_q, 512), dtype of q
    lse : array, (b, h_q, s_q), float32

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError, PlanError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Precision and limits: as for `mla_cupy.mla_decode`, `mla_cupy.sparse_mla_decode` (FP8 caches) and
    `mla_cupy.sparse_mla_forward`. In a CUDA graph, see `FlashMLASchedMeta.update`.

    Examples
    --------
    >>> import numpy as np
    >>> from mla_cupy.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
    >>> q, cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 1, 576), np.float16)
    >>> table, seqlens = np.array([[2, 0], [1, 3]], np.int32), np.array([100, 0], np.int32)
    >>> schedule, _ = get_mla_metadata()
    >>> out, lse = flash_mla_with_kvcache(q, cache, table, seqlens, 512, schedule)
    >>> out.shape, round(float(lse[0, 0, 0]), 3), float(lse[1, 0, 0])
    ((2, 1, 16, 512), 28.605, inf)
    """
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    arrays = (q, k_cache, block_table, cache_seqlens, indices, topk_length, attn_sink)
    schedule = tile_scheduler_metadata
    try:
        check_decode(schedule, num_splits, head_dim_v)
        causal, fp8 = check_flag("causal", causal), check_flag("is_fp8_kvcache", is_fp8_kvcache)
        record = _record_named(kv_format, fp8)
        options = (extra, softmax_scale, causal, fp8, record, check_flag("strict", strict))
        parts = [_decode(schedule, part, *options) for part in _by_kv_head(arrays)]
        return parts[0] if len(parts) == 1 else (_joined([x for x, _ in parts], 2), _joined([x for _, x in parts], 1))
    except MlaError as error:
        raise renamed(error, OF_DECODE) from error


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    indexer_topk: int = 0,
    *,
    strict: bool = False,
) -> tuple[Any, ...]:
    """Attend from each query to the rows of `kv` that its indices select.

    Parameters
    ----------
    q : array, (s_q, h_q, d_qk), bfloat16 or float16
        d_qk is 576 or 512.
    kv : array, (s_kv, 1, d_qk), dtype of q
    indices : array, (s_q, 1, topk), int32
        Values outside [0, s_kv), such as -1, are skipped.
    sm_scale : float
    d_v : int
        512.
    attn_sink : array, (h_q,), float32, optional
    topk_length : array, (s_q,), int32, optional
        Number of each query's indices that count.
    indexer_topk : int
        At most topk. Unless 0, a fourth result is the log-sum-exp over the first `indexer_topk` of each query's
        indices: the indexer's selection, where other rows follow it.
    strict : bool
        Raise an error where FlashMLA does on Hopper: for float16, for other than 64 or 128 heads, for a `topk` that is
        not a multiple of 128, for arrays without their axis of one head, and for an `indexer_topk` other than 0, 512,
        1024 and, with 64 heads, 2048, or other than 0 with 128 heads and a d_qk of 576.

    Returns
    -------
    out : array, (s_q, h_q, 512), dtype of q
    max_logits : array, (s_q, h_q), float32
        -inf for a query that selects nothing.
    lse : array, (s_q, h_q), float32
        Without the sink.
    lse_indexer : array, (s_q, h_q), float32
        Returned with an `indexer_topk` only.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched.

    Notes
    -----
    Precision and limits: as for `mla_cupy.sparse_mla_forward`. It records no gradient. `lse_indexer` comes from a
    second call, over the first indices, which costs as much as attention to them; FlashMLA's kernel computes it on the
    way.

    Examples
    --------
    >>> import numpy as np
    >>> from mla_cupy.compat.flash_mla import flash_mla_sparse_fwd
    >>> q, kv = np.ones((2, 16, 576), np.float16), np.ones((100, 1, 576), np.float16)
    >>> indices = np.array([[[3, 70, -1]], [[-1, -1, -1]]], np.int32)
    >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    >>> out.shape, round(float(lse[0, 0]), 3), float(lse[1, 0]), float(max_logits[1, 0])
    ((2, 16, 512), 24.693, inf, -inf)
    """
    try:
        axes = view_of(indices, "indices").shape
        first = check_count("indexer_topk", indexer_topk, 0, axes[-1] if axes else 0)
        if check_flag("strict", strict):
            _check_strict_sparse(q, kv, indices, first)
        _check_head_dim_v("d_v", d_v)
        return _sparse_forward((q, kv, indices), first, sm_scale, attn_sink, topk_length)
    except MlaError as error:
        raise renamed(error, _OF_SPARSE) from error


def _sparse_forward(
    arrays: tuple[Any, Any, Any], first: int, scale: Any, attn_sink: Any, topk_length: Any
) -> tuple[Any, ...]:
    """The call, and another one over the first indices, if there are any of the indexer's."""
    options = {"scale": scale, "topk_length": topk_length, "empty_lse": EMPTY_LSE}
    out, lse, max_logits = sparse_mla_forward(*arrays, attn_sink=attn_sink, **options)
    if first == 0:
        return out, max_logits, lse
    _, lse_indexer, _ = sparse_mla_forward(*arrays[:2], arrays[2][..., :first], **options)
    return out, max_logits, lse, lse_indexer


def _by_kv_head(arrays: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Arrays of each KV head: of one, but where a dense cache in FlashMLA's layout has more."""
    q, k_cache, *rest = arrays
    shape: Any = getattr(k_cache, "shape", None)
    of_q: Any = getattr(q, "shape", None)
    indices = arrays[4]
    are_four = all(isinstance(x, tuple) and len(x) == 4 for x in (shape, of_q))
    if indices is not None or not are_four or shape[1] == 1 or shape[2] < 2:
        return [arrays]
    if q.shape[2] % shape[2]:
        raise ShapeError(explain("q.shape[2]", q.shape[2], f"a multiple of h_kv={shape[2]}, as in k_cache"))
    group = q.shape[2] // shape[2]
    return [(q[:, :, n * group : (n + 1) * group], k_cache[:, :, n : n + 1], *rest) for n in range(shape[2])]


def _joined(parts: list[Any], axis: int) -> Any:
    """Arrays of a library as one."""
    name = type(parts[0]).__module__.partition(".")[0]
    library = importlib.import_module("jax.numpy" if name.startswith("jax") else name)
    return library.concatenate(parts, axis=axis)


def _decode(
    schedule: FlashMLASchedMeta,
    arrays: tuple[Any, ...],
    extra: tuple[Any, Any, Any],
    scale: float | None,
    causal: bool,
    fp8: bool,
    kv_format: str | None,
    strict: bool,
) -> tuple[Any, Any]:
    q, k_cache, block_table, cache_seqlens, indices, topk_length, attn_sink = arrays
    _check_extra(*extra, fp8 and indices is not None)
    form = form_of(q, k_cache, block_table, causal, indices, fp8, extra[:2], kv_format=kv_format)
    if strict:
        _check_strict_decode(form)
    schedule.check(form)
    if indices is not None:
        if causal:
            raise ArgumentError(explain("causal", causal, "False", "drop it: indices select the keys"))
        selection = (q, k_cache, indices, topk_length, attn_sink)
        scale = default_scale(form) if scale is None else scale
        if form.record:
            results = _sparse_decode_fp8(form, *selection, *extra, scale)
        else:
            results = _sparse_decode(form, *selection, scale)
        schedule.keep(form, None)
        return results
    if not (attn_sink is topk_length is None):
        name = "topk_length" if attn_sink is None else "attn_sink"
        raise ArgumentError(explain(name, "an array, without indices", "None"))
    if block_table is None or cache_seqlens is None:
        missing = "block_table" if block_table is None else "cache_seqlens"
        raise ArgumentError(explain(missing, None, "an array, since there are no indices"))
    plan = schedule.plan(form, q, k_cache, cache_seqlens)
    scale = default_scale(form) if scale is None else scale
    named = Fp8(kv_format=form.record or None)
    results = mla_decode(
        *(q, k_cache, block_table, cache_seqlens), scale=scale, causal=causal, fp8=named, plan=plan, empty_lse=EMPTY_LSE
    )
    schedule.keep(form, plan)
    return results


OF_DECODE = {
    "kv_cache": "k_cache",
    "kv": "k_cache",
    "seqlens": "cache_seqlens",
    "scale": "softmax_scale",
    "extra_kv_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
}
"""FlashMLA's names of the arguments of `mla_decode`, `sparse_mla_decode` and `sparse_mla_forward`."""
_OF_SPARSE = {"scale": "sm_scale"}


def _sparse_decode_fp8(
    form: Form,
    q: Any,
    k_cache: Any,
    indices: Any,
    topk_length: Any,
    attn_sink: Any,
    extra_k_cache: Any,
    extra_indices: Any,
    extra_topk_length: Any,
    scale: float,
) -> tuple[Any, Any]:
    """One call; queries with unevenly spaced sequences are copied by their library."""
    b, s_q, h_q, d_qk = form.b, form.s_q, form.h_q, form.d_qk
    out, lse = sparse_mla_decode(
        *(q.reshape(b * s_q, h_q, d_qk).reshape(b, s_q, h_q, d_qk), k_cache, indices),
        topk_length=topk_length,
        attn_sink=attn_sink,
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        fp8=Fp8(kv_format=form.record),
        scale=scale,
        empty_lse=EMPTY_LSE,
    )
    return out, lse.swapaxes(1, 2)


def _sparse_decode(
    form: Form, q: Any, k_cache: Any, indices: Any, topk_length: Any, attn_sink: Any, scale: float
) -> tuple[Any, Any]:
    """Each query is a row of one sparse call; the cache is its flat list of tokens."""
    b, s_q, h_q = form.b, form.s_q, form.h_q
    if tuple(indices.shape[:2]) != (b, s_q):
        raise ShapeError(explain("indices.shape", tuple(indices.shape), f"({b}, {s_q}, topk), as q has b and s_q"))
    page_stride, *strides, _ = view_of(k_cache, "k_cache").strides
    pages, row_stride = k_cache.shape[0], strides[2 - head_axis(k_cache.shape, "k_cache")]
    if pages > 1 and page_stride != form.page_size * row_stride:
        expected = f"{form.page_size * row_stride}, page_size rows"
        remedy = "copy the cache to pages without gaps"
        raise ShapeError(explain("k_cache's stride of pages", page_stride, expected, remedy))
    if k_cache.shape[3] != form.d_qk:
        raise ShapeError(explain("k_cache.shape[3]", k_cache.shape[3], f"d_qk={form.d_qk}, as in q"))
    lengths = topk_length
    if lengths is not None and view_of(lengths, "topk_length").shape != (b,):
        raise ShapeError(explain("topk_length.shape", tuple(lengths.shape), f"({b},), as q has b"))
    if lengths is not None and s_q != 1 and form.topk:
        # A length for each query of a sequence, in whatever library: 0 times anything spreads it.
        lengths = (indices[:, :, 0] * 0 + lengths.reshape(b, 1)).reshape(b * s_q)
    out, lse, _ = sparse_mla_forward(
        q.reshape(b * s_q, h_q, form.d_qk),
        k_cache.reshape(pages * form.page_size, form.d_qk),
        indices.reshape(b * s_q, form.topk),
        scale=scale,
        topk_length=lengths if form.topk else None,
        attn_sink=attn_sink,
        empty_lse=EMPTY_LSE,
    )
    return out.reshape(b, s_q, h_q, D_V), lse.reshape(b, s_q, h_q).swapaxes(1, 2)


def default_scale(form: Form) -> float:
    """FlashMLA's: of the keys' width, which the operation checks."""
    return float(max(form.d_qk, 1) ** -0.5)


def _record_named(kv_format: Any, fp8: bool) -> str | None:
    """The record that a caller names in FlashMLA's words."""
    if kv_format is None:
        return None
    if not fp8:
        raise ArgumentError(explain("kv_format", repr(kv_format), "None, as is_fp8_kvcache is False"))
    if not isinstance(kv_format, str) or kv_format not in _KV_FORMATS:
        raise ArgumentError(explain("kv_format", repr(kv_format), f"None, or one of {', '.join(_KV_FORMATS)}"))
    return _KV_FORMATS[kv_format]


def _check_head_dim_v(argument: str, width: Any) -> None:
    if not (is_integer(width) and width == D_V):
        raise ArgumentError(explain(argument, repr(width), str(D_V)))


def check_decode(schedule: Any, num_splits: Any, head_dim_v: int) -> None:
    """Check the arguments, other than arrays, that both kinds of dense decode share."""
    if not isinstance(schedule, FlashMLASchedMeta):
        remedy = "pass get_mla_metadata()[0] of this module"
        raise PlanError(explain("tile_scheduler_metadata", type(schedule).__name__, "a FlashMLASchedMeta", remedy))
    if num_splits is not None:
        raise ArgumentError(
            explain("num_splits", kind_of(num_splits), "None", "pass None: the schedule holds the splits")
        )
    _check_head_dim_v("head_dim_v", head_dim_v)


def _check_extra(cache: Any, indices: Any, length: Any, possible: bool) -> None:
    """Check that a second cache and its indices are passed together, and only with a first FP8 cache with indices."""
    names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    given = [name for name, x in zip(names, (cache, indices, length), strict=True) if x is not None]
    if given and not possible:
        raise ArgumentError(explain(given[0], "an array", "None", "pass it with indices and an FP8 cache"))
    if given and (cache is None or indices is None):
        missing = names[0] if cache is None else names[1]
        raise ArgumentError(explain(missing, None, f"an array, as {given[0]} is given"))


def _check_strict_decode(form: Form) -> None:
    if (form.topk is not None) != bool(form.record):
        expected = "True, with indices" if form.topk is not None else "False, without indices"
        raise ArgumentError(explain("is_fp8_kvcache", bool(form.record), expected, "or strict=False"))
    if form.record == "v41":
        raise ShapeError(explain("k_cache.shape[-1]", FORMATS["v41"].width, "656 or 584", "or strict=False"))
    if form.topk is not None and form.h_q not in _HEADS:
        raise ShapeError(explain("q.shape[2]", form.h_q, "64 or 128 heads", "or strict=False"))
    if form.topk is None and form.page_size != _PAGE_SIZE:
        raise ShapeError(explain("k_cache.shape[1]", form.page_size, f"{_PAGE_SIZE}", "or strict=False"))
    if form.b < 1:
        raise ShapeError(explain("q.shape[0]", form.b, "at least 1", "or strict=False"))


def _check_strict_sparse(q: Any, kv: Any, indices: Any, indexer_topk: int) -> None:
    for name, x in (("q", q), ("kv", kv), ("indices", indices)):
        shape = view_of(x, name).shape
        if len(shape) != 3:
            raise ShapeError(explain(f"{name}.shape", shape, "3 axes", "or strict=False"))
    if (dtype := dtypes.name_of(q.dtype)) != "bfloat16":
        raise DTypeError(explain("q.dtype", dtype, "bfloat16", "or strict=False"))
    if q.shape[1] not in _HEADS:
        raise ShapeError(explain("q.shape[1]", q.shape[1], "64 or 128 heads", "or strict=False"))
    if indices.shape[2] % _TOPK:
        raise ShapeError(explain("indices.shape[2]", indices.shape[2], f"a multiple of {_TOPK}", "or strict=False"))
    built = _INDEXER_TOPK if q.shape[1] == 64 else _INDEXER_TOPK[: 3 if q.shape[2] == 512 else 1]
    if indexer_topk not in built:
        expected = f"one of {built}, with {q.shape[1]} heads and d_qk {q.shape[2]}"
        raise ArgumentError(explain("indexer_topk", indexer_topk, expected, "or strict=False"))


def __dir__() -> list[str]:
    return __all__
