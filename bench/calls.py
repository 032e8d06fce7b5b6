"""The public call of a case, on arrays without memory: for questions about a call that nobody makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import mla_cupy
from mla_cupy.cache_formats import FORMATS
from mla_cupy.dtypes import numpy_dtype

from .core.cost import D_V
from .core.errors import BenchError
from .ops import indexer_logits, prefill, sparse_decode, sparse_forward_fp8
from .ops.dense_decode_fp8 import Fp8DecodeCase

_Call = partial[Any]


def call_of(operation: str, case: Any, dtype: str) -> _Call:
    """The call that a case measures; its arrays can be looked at, but not read.

    Raises
    ------
    BenchError
        If the case measures more than one call of an operation.
    """
    make = _CALLS.get(operation)
    if make is None:
        raise BenchError(f"operation {operation!r}: expected one of {', '.join(_CALLS)}")
    return make(case, dtype)


def _array(dtype: str, *shape: int) -> Any:
    """A contiguous array of this shape over the memory of one element."""
    one = np.zeros(1, numpy_dtype(dtype))
    strides = one.itemsize * np.cumprod([1, *shape[:0:-1]])[::-1]
    return as_strided(one, shape, tuple(int(stride) for stride in strides), writeable=False)


def _decode(case: Any, dtype: str) -> _Call:
    return _decode_over(_array(dtype, case.num_pages, case.page_size, 1, case.d_qk), case, dtype)


def _decode_fp8(case: Fp8DecodeCase, dtype: str) -> _Call:
    records = _array("uint8", case.num_pages, case.page_size, 1, case.record.token_bytes)
    more = {"fp8": mla_cupy.Fp8(case.math)} if case.fp8_math else {}
    return _decode_over(records, case, dtype, **more)


def _decode_over(cache: Any, case: Any, dtype: str, **more: Any) -> _Call:
    q, table = _array(dtype, case.b, case.s_q, case.h_q, case.d_qk), _array("int32", case.b, case.max_pages)
    lengths = _array("int32", case.b)
    return partial(mla_cupy.mla_decode, q, cache, table, lengths, scale=case.scale, **case.options, **more)


def _sparse_decode(case: sparse_decode.SparseDecodeCase, dtype: str) -> _Call:
    more: dict[str, Any] = {"fp8": mla_cupy.Fp8("fp8")} if case.math != "exact" else {}
    if case.extra:
        more |= {"extra_kv_cache": _pool(case.extra_record, case.pool)}
        more |= {"extra_indices": _array("int32", case.b, case.s_q, case.extra)}
    if case.has_sink:
        more["attn_sink"] = _array("float32", case.h_q)
    q, indices = _array(dtype, case.b, case.s_q, case.h_q, case.d_qk), _array("int32", case.b, case.s_q, case.topk)
    return partial(mla_cupy.sparse_mla_decode, q, _pool(case.record, case.pool), indices, scale=case.scale, **more)


def _pool(record: str, tokens: int) -> Any:
    page = sparse_decode.PAGE_SIZE
    return _array("uint8", tokens // page, page, FORMATS[record].token_bytes)


def _sparse_forward(case: Any, dtype: str) -> _Call:
    return _sparse_forward_over(_array(dtype, case.s_kv, case.d_qk), case, dtype)


def _sparse_forward_fp8(case: sparse_forward_fp8.Fp8ForwardCase, dtype: str) -> _Call:
    page = sparse_forward_fp8.PAGE_SIZE
    records = _array("uint8", case.s_kv // page, page, case.record.token_bytes)
    more = {"fp8": mla_cupy.Fp8("fp8")} if case.fp8_math else {}
    return _sparse_forward_over(records, case, dtype, **more)


def _sparse_forward_over(kv: Any, case: Any, dtype: str, **more: Any) -> _Call:
    q, indices = _array(dtype, case.s_q, case.h_q, case.d_qk), _array("int32", case.s_q, case.topk)
    return partial(mla_cupy.sparse_mla_forward, q, kv, indices, scale=case.scale, **more)


def _sparse_backward(case: Any, dtype: str) -> _Call:
    rows = case.s_q, case.h_q
    forward = _array(dtype, *rows, case.d_qk), _array(dtype, case.s_kv, case.d_qk)
    results = _array(dtype, *rows, D_V), _array(dtype, *rows, D_V), _array("float32", *rows)
    indices = _array("int32", case.s_q, case.topk)
    return partial(mla_cupy.sparse_mla_backward, *forward, *results, indices, scale=case.scale)


def _prefill(case: prefill.PrefillCase, dtype: str) -> _Call:
    rows = case.b * case.s_q, case.h_q
    more: dict[str, Any] = {}
    if case.state:
        more |= {"state_out": _array("float32", *rows, case.d_v), "state_lse": _array("float32", *rows)}
    if case.topk:
        more["mask"] = _array("uint8", rows[0], prefill.mask_bytes(case))
    return partial(mla_cupy.mla_prefill, **_operands("uint8" if case.fp8 else dtype, case), **more)


def _prefill_backward(case: prefill.PrefillCase, dtype: str) -> _Call:
    rows = case.b * case.s_q, case.h_q
    out = _array(dtype, *rows, case.d_v)
    return partial(
        mla_cupy.mla_prefill_backward, **_operands(dtype, case), out=out, dout=out, lse=_array("float32", *rows)
    )


def _operands(dtype: str, case: prefill.PrefillCase) -> dict[str, Any]:
    """Arguments of a layer; keys and values are views of one array."""
    width, keys = case.d_qk - prefill.D_ROPE, case.b * case.s_kv
    kv, starts = _array(dtype, keys, case.heads_kv, width + case.d_v), _array("int32", case.b + 1)
    return {
        "q": _array(dtype, case.b * case.s_q, case.h_q, case.d_qk),
        "k": kv[..., :width],
        "v": kv[..., width:],
        "k_rope": _array(dtype, keys, prefill.D_ROPE),
        "packed": mla_cupy.Packed(starts, starts),
        "causal": case.causal,
        "scale": case.scale,
    }


def _indexer_logits(case: Any, dtype: str) -> _Call:
    return _paged_logits(case) if case.b else _flat_logits(case)


def _paged_logits(case: Any) -> _Call:
    page, pages = indexer_logits.PAGE_SIZE, case.num_keys // indexer_logits.PAGE_SIZE
    return partial(
        mla_cupy.indexer_logits_paged,
        q=_array("uint8", case.b, case.s_q, case.h, case.d),
        cache=_array("uint8", case.b * pages, page, 1, case.key_bytes),
        weights=_array("float32", case.b, case.s_q, case.h),
        seqlens=_array("int32", case.b),
        block_table=_array("int32", case.b, pages),
    )


def _flat_logits(case: Any) -> _Call:
    kind = "bfloat16" if case.bf16 else "uint8"
    more: dict[str, Any] = {"accumulate": "float16"} if case.float16 else {}
    if not case.bf16:
        more["k_scale"] = _array("float32", case.s_kv)
    return partial(
        mla_cupy.indexer_logits,
        q=_array(kind, case.s_q, case.h, case.d),
        k=_array(kind, case.s_kv, case.d),
        weights=_array("float32", case.s_q, case.h),
        ks=_array("int32", case.s_q),
        ke=_array("int32", case.s_q),
        **more,
    )


def _indexer_topk(case: Any, dtype: str) -> _Call:
    return partial(mla_cupy.indexer_topk, _array("float32", case.s_q, case.s_kv), case.k, return_values=False)


_CALLS: Mapping[str, Callable[[Any, str], _Call]] = {
    "decode": _decode,
    "dense-decode-fp8": _decode_fp8,
    "sparse-decode": _sparse_decode,
    "sparse-forward": _sparse_forward,
    "sparse-forward-fp8": _sparse_forward_fp8,
    "sparse-backward": _sparse_backward,
    "prefill": _prefill,
    "prefill-backward": _prefill_backward,
    "indexer-logits": _indexer_logits,
    "indexer-topk": _indexer_topk,
}
NAMES = tuple(_CALLS)
"""The operations of `call_of`."""
