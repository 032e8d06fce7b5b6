"""Operators of all operations.

Written by `python -m tools.generate` from the operations' records.
"""

from __future__ import annotations

from math import inf
from typing import Any

from mla_cupy.ops import BOUND_OPERATIONS
from mla_cupy.ops.call import Invocation
from mla_cupy.torch.library import Operators


def _cache_append(
    latent: Any,
    rope: Any,
    cache: Any,
    slots: Any,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    kv_format: Any = None,
    scales: Any = None,
    kv_scale: Any = 1,
    interleaved: Any = True,
) -> Invocation:
    arrays = (latent, rope, cache, slots, cos, sin, positions)
    options = (kv_format, scales, kv_scale, interleaved)
    return Invocation(BOUND_OPERATIONS["cache_append"], arrays, options)


CACHE_APPEND = Operators(
    BOUND_OPERATIONS["cache_append"],
    _cache_append,
    arguments=(
        "Tensor latent, Tensor? rope, Tensor(m!) cache, Tensor slots, Tensor? cos=None, Tensor? sin=None, "
        "Tensor? positions=None, str? kv_format=None, str? scales=None, float kv_scale=1.0, "
        "bool interleaved=True"
    ),
)


def _cache_gather(
    cache: Any,
    slots: Any,
    kv_format: Any = None,
    kv_scale: Any = 1,
    out_dtype: Any = None,
    *,
    out: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (cache, slots, out)
    options = (kv_format, kv_scale, out_dtype)
    return Invocation(BOUND_OPERATIONS["cache_gather"], arrays, options, workspace)


CACHE_GATHER = Operators(
    BOUND_OPERATIONS["cache_gather"],
    _cache_gather,
    arguments="Tensor cache, Tensor slots, str? kv_format=None, float kv_scale=1.0, ScalarType? out_dtype=None",
    results="Tensor(a!) out",
    returns="(Tensor)",
)


def _cache_copy_pages(pool: Any, pairs: Any) -> Invocation:
    arrays = (pool, pairs)
    options = ()
    return Invocation(BOUND_OPERATIONS["cache_copy_pages"], arrays, options)


CACHE_COPY_PAGES = Operators(
    BOUND_OPERATIONS["cache_copy_pages"], _cache_copy_pages, arguments="Tensor(k!) pool, Tensor pairs"
)


def _cache_slots(
    block_table: Any,
    starts: Any,
    lengths: Any,
    page_size: Any,
    max_tokens: Any,
    num_pages: Any = None,
    *,
    slots: Any = None,
    cu_seqlens: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (block_table, starts, lengths, slots, cu_seqlens)
    options = (page_size, max_tokens, num_pages)
    return Invocation(BOUND_OPERATIONS["cache_slots"], arrays, options, workspace)


CACHE_SLOTS = Operators(
    BOUND_OPERATIONS["cache_slots"],
    _cache_slots,
    arguments=("Tensor block_table, Tensor starts, Tensor lengths, int page_size, int max_tokens, int? num_pages=None"),
    results="Tensor(a!) slots, Tensor(b!) cu_seqlens",
    returns="(Tensor, Tensor)",
)


def _mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    seqlens: Any,
    scale: Any,
    q_rope: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    causal: Any = True,
    window: Any = None,
    tree_mask: Any = None,
    attn_sink: Any = None,
    out_cos: Any = None,
    out_sin: Any = None,
    out_positions: Any = None,
    w_uv: Any = None,
    gate: Any = None,
    math: Any = "exact",
    q_scale: Any = 1,
    kv_scale: Any = 1,
    q_scales: Any = None,
    kv_scales: Any = None,
    kv_format: Any = None,
    cp_world: Any = 1,
    cp_rank: Any = 0,
    out_dtype: Any = None,
    scales: Any = "plain",
    lse_base: Any = "e",
    empty_lse: Any = None,
    kernel: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    out_scales: Any = None,
    workspace: Any = None,
) -> Invocation:
    empty_lse = -inf if empty_lse is None else empty_lse
    arrays = (
        q,
        kv_cache,
        block_table,
        seqlens,
        q_rope,
        cu_seqlens_q,
        tree_mask,
        attn_sink,
        out_cos,
        out_sin,
        out_positions,
        w_uv,
        gate,
        q_scales,
        kv_scales,
        out,
        lse,
        out_scales,
    )
    options = (
        scale,
        max_seqlen_q,
        causal,
        window,
        math,
        q_scale,
        kv_scale,
        kv_format,
        cp_world,
        cp_rank,
        out_dtype,
        scales,
        lse_base,
        empty_lse,
        kernel,
    )
    return Invocation(BOUND_OPERATIONS["mla_decode"], arrays, options, workspace)


MLA_DECODE = Operators(
    BOUND_OPERATIONS["mla_decode"],
    _mla_decode,
    arguments=(
        "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seqlens, float scale, Tensor? q_rope=None, "
        "Tensor? cu_seqlens_q=None, int? max_seqlen_q=None, bool causal=True, int? window=None, "
        "Tensor? tree_mask=None, Tensor? attn_sink=None, Tensor? out_cos=None, Tensor? out_sin=None, "
        'Tensor? out_positions=None, Tensor? w_uv=None, Tensor? gate=None, str math="exact", '
        "float q_scale=1.0, float kv_scale=1.0, Tensor? q_scales=None, Tensor? kv_scales=None, "
        'str? kv_format=None, int cp_world=1, int cp_rank=0, ScalarType? out_dtype=None, str scales="plain", '
        'str lse_base="e", float? empty_lse=None, str? kernel=None'
    ),
    results="Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? out_scales=None",
    returns="(Tensor, Tensor, Tensor)",
    unwritten=("empty_lse",),
)


def _prefill_mask(
    indices: Any,
    max_keys: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    relative: Any = False,
    *,
    mask: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (indices, cu_seqlens_q, cu_seqlens_kv, mask)
    options = (max_keys, relative)
    return Invocation(BOUND_OPERATIONS["prefill_mask"], arrays, options, workspace)


PREFILL_MASK = Operators(
    BOUND_OPERATIONS["prefill_mask"],
    _prefill_mask,
    arguments=(
        "Tensor indices, int max_keys, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, bool relative=False"
    ),
    results="Tensor(a!) mask",
    returns="(Tensor)",
)


def _merge_states(
    outs: Any,
    lses: Any,
    lse_base: Any = "e",
    empty_lse: Any = None,
    out_dtype: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Invocation:
    empty_lse = -inf if empty_lse is None else empty_lse
    arrays = (outs, lses, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    return Invocation(BOUND_OPERATIONS["merge_states"], arrays, options, workspace)


MERGE_STATES = Operators(
    BOUND_OPERATIONS["merge_states"],
    _merge_states,
    arguments='Tensor outs, Tensor lses, str lse_base="e", float? empty_lse=None, ScalarType? out_dtype=None',
    results="Tensor(a!) out, Tensor(b!) lse",
    returns="(Tensor, Tensor)",
    unwritten=("empty_lse",),
)


def _mla_prefill(
    q: Any,
    k: Any,
    v: Any,
    q_rope: Any = None,
    k_rope: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    state_out: Any = None,
    state_lse: Any = None,
    mask: Any = None,
    q_scales: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    causal: Any = True,
    scale: Any = None,
    out_dtype: Any = None,
    kernel: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (
        q,
        k,
        v,
        q_rope,
        k_rope,
        cu_seqlens_q,
        cu_seqlens_kv,
        state_out,
        state_lse,
        mask,
        q_scales,
        k_scales,
        v_scales,
        out,
        lse,
    )
    options = (causal, scale, out_dtype, kernel)
    return Invocation(BOUND_OPERATIONS["mla_prefill"], arrays, options, workspace)


MLA_PREFILL = Operators(
    BOUND_OPERATIONS["mla_prefill"],
    _mla_prefill,
    arguments=(
        "Tensor q, Tensor k, Tensor v, Tensor? q_rope=None, Tensor? k_rope=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_kv=None, Tensor? state_out=None, Tensor? state_lse=None, Tensor? mask=None, "
        "Tensor? q_scales=None, Tensor? k_scales=None, Tensor? v_scales=None, bool causal=True, "
        "float? scale=None, ScalarType? out_dtype=None, str? kernel=None"
    ),
    results="Tensor(a!) out, Tensor(b!) lse",
    returns="(Tensor, Tensor)",
)


def _mla_prefill_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    dout: Any,
    lse: Any,
    q_rope: Any = None,
    k_rope: Any = None,
    dlse: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    causal: Any = True,
    scale: Any = None,
    deterministic: Any = False,
    kernel: Any = None,
    *,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dq_rope: Any = None,
    dk_rope: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, dq_rope, dk_rope)
    options = (causal, scale, deterministic, kernel)
    return Invocation(BOUND_OPERATIONS["mla_prefill_backward"], arrays, options, workspace)


MLA_PREFILL_BACKWARD = Operators(
    BOUND_OPERATIONS["mla_prefill_backward"],
    _mla_prefill_backward,
    arguments=(
        "Tensor q, Tensor k, Tensor v, Tensor out, Tensor dout, Tensor lse, Tensor? q_rope=None, "
        "Tensor? k_rope=None, Tensor? dlse=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        "bool causal=True, float? scale=None, bool deterministic=False, str? kernel=None"
    ),
    results="Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dq_rope=None, Tensor(e!)? dk_rope=None",
    returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _mla_prepare(
    q: Any,
    latent: Any = None,
    rope: Any = None,
    cache: Any = None,
    slots: Any = None,
    q_rope: Any = None,
    w_uk: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    theta: Any = None,
    interleaved: Any = True,
    quantise: Any = False,
    q_scale: Any = None,
    return_rope: Any = False,
    kv_format: Any = None,
    scales: Any = None,
    kv_scale: Any = 1,
    *,
    out: Any = None,
    q_scales: Any = None,
    rope_out: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, latent, rope, cache, slots, q_rope, w_uk, cos, sin, positions, out, q_scales, rope_out)
    options = (theta, interleaved, quantise, q_scale, return_rope, kv_format, scales, kv_scale)
    return Invocation(BOUND_OPERATIONS["mla_prepare"], arrays, options, workspace)


MLA_PREPARE = Operators(
    BOUND_OPERATIONS["mla_prepare"],
    _mla_prepare,
    arguments=(
        "Tensor q, Tensor? latent=None, Tensor? rope=None, Tensor(n!)? cache=None, Tensor? slots=None, "
        "Tensor? q_rope=None, Tensor? w_uk=None, Tensor? cos=None, Tensor? sin=None, Tensor? positions=None, "
        "float? theta=None, bool interleaved=True, bool quantise=False, float? q_scale=None, "
        "bool return_rope=False, str? kv_format=None, str? scales=None, float kv_scale=1.0"
    ),
    results="Tensor(a!) out, Tensor(b!)? q_scales=None, Tensor(c!)? rope_out=None",
    returns="(Tensor, Tensor, Tensor)",
)


def _absorb(q_nope: Any, w_uk: Any, q_rope: Any = None, *, out: Any = None, workspace: Any = None) -> Invocation:
    arrays = (q_nope, w_uk, q_rope, out)
    options = ()
    return Invocation(BOUND_OPERATIONS["absorb"], arrays, options, workspace)


ABSORB = Operators(
    BOUND_OPERATIONS["absorb"],
    _absorb,
    arguments="Tensor q_nope, Tensor w_uk, Tensor? q_rope=None",
    results="Tensor(a!) out",
    returns="(Tensor)",
)


def _merge_project(
    outs: Any,
    w_uv: Any,
    lses: Any = None,
    gate: Any = None,
    lse_base: Any = "e",
    empty_lse: Any = None,
    out_dtype: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> Invocation:
    empty_lse = -inf if empty_lse is None else empty_lse
    arrays = (outs, w_uv, lses, gate, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    return Invocation(BOUND_OPERATIONS["merge_project"], arrays, options, workspace)


MERGE_PROJECT = Operators(
    BOUND_OPERATIONS["merge_project"],
    _merge_project,
    arguments=(
        'Tensor outs, Tensor w_uv, Tensor? lses=None, Tensor? gate=None, str lse_base="e", '
        "float? empty_lse=None, ScalarType? out_dtype=None"
    ),
    results="Tensor(a!) out, Tensor(b!)? lse=None",
    returns="(Tensor, Tensor)",
    unwritten=("empty_lse",),
)


def _prefill_segments(
    segment_ids_q: Any,
    max_segments: Any,
    segment_ids_kv: Any = None,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (segment_ids_q, segment_ids_kv, cu_seqlens_q, cu_seqlens_kv)
    options = (max_segments,)
    return Invocation(BOUND_OPERATIONS["prefill_segments"], arrays, options, workspace)


PREFILL_SEGMENTS = Operators(
    BOUND_OPERATIONS["prefill_segments"],
    _prefill_segments,
    arguments="Tensor segment_ids_q, int max_segments, Tensor? segment_ids_kv=None",
    results="Tensor(a!) cu_seqlens_q, Tensor(b!) cu_seqlens_kv",
    returns="(Tensor, Tensor)",
)


def _sparse_mla_backward(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    indices: Any,
    scale: Any,
    dlse: Any = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: Any = False,
    relative: Any = True,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    lse_base: Any = "e",
    deterministic: Any = False,
    dkv_dtype: Any = None,
    kernel: Any = None,
    *,
    dq: Any = None,
    dkv: Any = None,
    d_sink: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (
        q,
        kv,
        out,
        dout,
        lse,
        indices,
        topk_length,
        attn_sink,
        cu_seqlens_q,
        cu_seqlens_kv,
        dlse,
        dq,
        dkv,
        d_sink,
    )
    options = (scale, causal, relative, lse_base, deterministic, dkv_dtype, kernel)
    return Invocation(BOUND_OPERATIONS["sparse_mla_backward"], arrays, options, workspace)


SPARSE_MLA_BACKWARD = Operators(
    BOUND_OPERATIONS["sparse_mla_backward"],
    _sparse_mla_backward,
    arguments=(
        "Tensor q, Tensor kv, Tensor out, Tensor dout, Tensor lse, Tensor indices, float scale, "
        "Tensor? dlse=None, Tensor? topk_length=None, Tensor? attn_sink=None, bool causal=False, "
        'bool relative=True, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, str lse_base="e", '
        "bool deterministic=False, ScalarType? dkv_dtype=None, str? kernel=None"
    ),
    results="Tensor(a!) dq, Tensor(b!) dkv, Tensor(c!)? d_sink=None",
    returns="(Tensor, Tensor, Tensor)",
)


def _sparse_mla_decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    scale: Any,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out_cos: Any = None,
    out_sin: Any = None,
    out_positions: Any = None,
    w_uv: Any = None,
    gate: Any = None,
    math: Any = "exact",
    kv_scale: Any = 1,
    kv_format: Any = None,
    batch_invariant: Any = False,
    split_tokens: Any = 4096,
    lse_base: Any = "e",
    empty_lse: Any = None,
    out_dtype: Any = None,
    scales: Any = "plain",
    kernel: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    out_scales: Any = None,
    workspace: Any = None,
) -> Invocation:
    empty_lse = -inf if empty_lse is None else empty_lse
    arrays = (
        q,
        kv_cache,
        indices,
        topk_length,
        attn_sink,
        extra_kv_cache,
        extra_indices,
        extra_topk_length,
        out_cos,
        out_sin,
        out_positions,
        w_uv,
        gate,
        out,
        lse,
        out_scales,
    )
    options = (
        scale,
        math,
        kv_scale,
        kv_format,
        batch_invariant,
        split_tokens,
        lse_base,
        empty_lse,
        out_dtype,
        scales,
        kernel,
    )
    return Invocation(BOUND_OPERATIONS["sparse_mla_decode"], arrays, options, workspace)


SPARSE_MLA_DECODE = Operators(
    BOUND_OPERATIONS["sparse_mla_decode"],
    _sparse_mla_decode,
    arguments=(
        "Tensor q, Tensor kv_cache, Tensor indices, float scale, Tensor? topk_length=None, "
        "Tensor? attn_sink=None, Tensor? extra_kv_cache=None, Tensor? extra_indices=None, "
        "Tensor? extra_topk_length=None, Tensor? out_cos=None, Tensor? out_sin=None, "
        'Tensor? out_positions=None, Tensor? w_uv=None, Tensor? gate=None, str math="exact", '
        "float kv_scale=1.0, str? kv_format=None, bool batch_invariant=False, int split_tokens=4096, "
        'str lse_base="e", float? empty_lse=None, ScalarType? out_dtype=None, str scales="plain", '
        "str? kernel=None"
    ),
    results="Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? out_scales=None",
    returns="(Tensor, Tensor, Tensor)",
    unwritten=("empty_lse",),
)


def _sparse_mla_forward(
    q: Any,
    kv: Any,
    indices: Any,
    scale: Any,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: Any = False,
    relative: Any = True,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    math: Any = "exact",
    kv_scale: Any = 1,
    kv_format: Any = None,
    batch_invariant: Any = False,
    split_tokens: Any = 4096,
    lse_base: Any = "e",
    empty_lse: Any = None,
    out_dtype: Any = None,
    kernel: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    max_logits: Any = None,
    workspace: Any = None,
) -> Invocation:
    empty_lse = -inf if empty_lse is None else empty_lse
    arrays = (q, kv, indices, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv, out, lse, max_logits)
    options = (
        scale,
        causal,
        relative,
        math,
        kv_scale,
        kv_format,
        batch_invariant,
        split_tokens,
        lse_base,
        empty_lse,
        out_dtype,
        kernel,
    )
    return Invocation(BOUND_OPERATIONS["sparse_mla_forward"], arrays, options, workspace)


SPARSE_MLA_FORWARD = Operators(
    BOUND_OPERATIONS["sparse_mla_forward"],
    _sparse_mla_forward,
    arguments=(
        "Tensor q, Tensor kv, Tensor indices, float scale, Tensor? topk_length=None, Tensor? attn_sink=None, "
        "bool causal=False, bool relative=True, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        'str math="exact", float kv_scale=1.0, str? kv_format=None, bool batch_invariant=False, '
        'int split_tokens=4096, str lse_base="e", float? empty_lse=None, ScalarType? out_dtype=None, '
        "str? kernel=None"
    ),
    results="Tensor(a!) out, Tensor(b!) lse, Tensor(c!) max_logits",
    returns="(Tensor, Tensor, Tensor)",
    unwritten=("empty_lse",),
)


def _indexer_head_sums(
    q: Any,
    k: Any,
    scale: Any,
    q_rope: Any = None,
    k_rope: Any = None,
    indices: Any = None,
    lse: Any = None,
    topk_length: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    causal: Any = True,
    relative: Any = True,
    buffer_bytes: Any = 536870912,
    kernel: Any = None,
    *,
    head_sums: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, k, q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, head_sums)
    options = (scale, causal, relative, buffer_bytes, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_head_sums"], arrays, options, workspace)


INDEXER_HEAD_SUMS = Operators(
    BOUND_OPERATIONS["indexer_head_sums"],
    _indexer_head_sums,
    arguments=(
        "Tensor q, Tensor k, float scale, Tensor? q_rope=None, Tensor? k_rope=None, Tensor? indices=None, "
        "Tensor? lse=None, Tensor? topk_length=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
        "bool causal=True, bool relative=True, int buffer_bytes=536870912, str? kernel=None"
    ),
    results="Tensor(a!) head_sums",
    returns="(Tensor)",
)


def _indexer_cache_append(
    k: Any,
    cache: Any,
    slots: Any,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    norm_weight: Any = None,
    norm_bias: Any = None,
    interleaved: Any = False,
    hadamard: Any = True,
    scales: Any = "power_of_2",
    reference_rounding: Any = True,
    eps: Any = 1e-06,
) -> Invocation:
    arrays = (k, cache, slots, cos, sin, positions, norm_weight, norm_bias)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    return Invocation(BOUND_OPERATIONS["indexer_cache_append"], arrays, options)


INDEXER_CACHE_APPEND = Operators(
    BOUND_OPERATIONS["indexer_cache_append"],
    _indexer_cache_append,
    arguments=(
        "Tensor k, Tensor(l!) cache, Tensor slots, Tensor? cos=None, Tensor? sin=None, Tensor? positions=None, "
        "Tensor? norm_weight=None, Tensor? norm_bias=None, bool interleaved=False, bool hadamard=True, "
        'str scales="power_of_2", bool reference_rounding=True, float eps=1e-06'
    ),
)


def _indexer_cache_gather(
    cache: Any, slots: Any, d: Any = None, *, codes: Any = None, k_scale: Any = None, workspace: Any = None
) -> Invocation:
    arrays = (cache, slots, codes, k_scale)
    options = (d,)
    return Invocation(BOUND_OPERATIONS["indexer_cache_gather"], arrays, options, workspace)


INDEXER_CACHE_GATHER = Operators(
    BOUND_OPERATIONS["indexer_cache_gather"],
    _indexer_cache_gather,
    arguments="Tensor cache, Tensor slots, int? d=None",
    results="Tensor(a!) codes, Tensor(b!) k_scale",
    returns="(Tensor, Tensor)",
)


def _indexer_logits(
    q: Any,
    k: Any,
    weights: Any,
    ks: Any = None,
    ke: Any = None,
    k_scale: Any = None,
    accumulate: Any = "float32",
    clean: Any = True,
    out_dtype: Any = None,
    kernel: Any = None,
    *,
    logits: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, k, weights, ks, ke, k_scale, logits)
    options = (accumulate, clean, out_dtype, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_logits"], arrays, options, workspace)


INDEXER_LOGITS = Operators(
    BOUND_OPERATIONS["indexer_logits"],
    _indexer_logits,
    arguments=(
        "Tensor q, Tensor k, Tensor weights, Tensor? ks=None, Tensor? ke=None, Tensor? k_scale=None, "
        'str accumulate="float32", bool clean=True, ScalarType? out_dtype=None, str? kernel=None'
    ),
    results="Tensor(a!) logits",
    returns="(Tensor)",
)


def _indexer_logits_paged(
    q: Any,
    cache: Any,
    weights: Any,
    seqlens: Any,
    block_table: Any,
    clean: Any = True,
    out_dtype: Any = None,
    kernel: Any = None,
    *,
    logits: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, cache, weights, seqlens, block_table, logits)
    options = (clean, out_dtype, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_logits_paged"], arrays, options, workspace)


INDEXER_LOGITS_PAGED = Operators(
    BOUND_OPERATIONS["indexer_logits_paged"],
    _indexer_logits_paged,
    arguments=(
        "Tensor q, Tensor cache, Tensor weights, Tensor seqlens, Tensor block_table, bool clean=True, "
        "ScalarType? out_dtype=None, str? kernel=None"
    ),
    results="Tensor(a!) logits",
    returns="(Tensor)",
)


def _indexer_prepare_q(
    q: Any,
    weights: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: Any = False,
    hadamard: Any = True,
    scales: Any = "power_of_2",
    reference_rounding: Any = True,
    accumulate: Any = "float32",
    *,
    codes: Any = None,
    folded: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, weights, cos, sin, positions, codes, folded)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate)
    return Invocation(BOUND_OPERATIONS["indexer_prepare_q"], arrays, options, workspace)


INDEXER_PREPARE_Q = Operators(
    BOUND_OPERATIONS["indexer_prepare_q"],
    _indexer_prepare_q,
    arguments=(
        "Tensor q, Tensor weights, Tensor cos, Tensor sin, Tensor positions, bool interleaved=False, "
        'bool hadamard=True, str scales="power_of_2", bool reference_rounding=True, str accumulate="float32"'
    ),
    results="Tensor(a!) codes, Tensor(b!) folded",
    returns="(Tensor, Tensor)",
)


def _indexer_prepare_k(
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: Any = False,
    hadamard: Any = True,
    scales: Any = "power_of_2",
    reference_rounding: Any = True,
    norm_weight: Any = None,
    norm_bias: Any = None,
    eps: Any = 1e-06,
    *,
    codes: Any = None,
    k_scale: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (k, cos, sin, positions, norm_weight, norm_bias, codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    return Invocation(BOUND_OPERATIONS["indexer_prepare_k"], arrays, options, workspace)


INDEXER_PREPARE_K = Operators(
    BOUND_OPERATIONS["indexer_prepare_k"],
    _indexer_prepare_k,
    arguments=(
        "Tensor k, Tensor cos, Tensor sin, Tensor positions, bool interleaved=False, bool hadamard=True, "
        'str scales="power_of_2", bool reference_rounding=True, Tensor? norm_weight=None, '
        "Tensor? norm_bias=None, float eps=1e-06"
    ),
    results="Tensor(a!) codes, Tensor(b!) k_scale",
    returns="(Tensor, Tensor)",
)


def _indexer_prepare(
    q: Any,
    weights: Any,
    k: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    cache: Any = None,
    slots: Any = None,
    norm_weight: Any = None,
    norm_bias: Any = None,
    interleaved: Any = False,
    hadamard: Any = True,
    scales: Any = "power_of_2",
    reference_rounding: Any = True,
    accumulate: Any = "float32",
    eps: Any = 1e-06,
    return_k: Any = False,
    *,
    codes: Any = None,
    folded: Any = None,
    k_codes: Any = None,
    k_scale: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (q, weights, k, cos, sin, positions, cache, slots, norm_weight, norm_bias, codes, folded, k_codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate, eps, return_k)
    return Invocation(BOUND_OPERATIONS["indexer_prepare"], arrays, options, workspace)


INDEXER_PREPARE = Operators(
    BOUND_OPERATIONS["indexer_prepare"],
    _indexer_prepare,
    arguments=(
        "Tensor q, Tensor weights, Tensor k, Tensor cos, Tensor sin, Tensor positions, Tensor(q!)? cache=None, "
        "Tensor? slots=None, Tensor? norm_weight=None, Tensor? norm_bias=None, bool interleaved=False, "
        'bool hadamard=True, str scales="power_of_2", bool reference_rounding=True, str accumulate="float32", '
        "float eps=1e-06, bool return_k=False"
    ),
    results="Tensor(a!) codes, Tensor(b!) folded, Tensor(c!)? k_codes=None, Tensor(d!)? k_scale=None",
    returns="(Tensor, Tensor, Tensor, Tensor)",
)


def _indexer_sparse_loss(
    q: Any,
    k: Any,
    index_q: Any,
    index_k: Any,
    weights: Any,
    indices: Any,
    scale: Any,
    k_scale: Any = None,
    q_scale: Any = None,
    lse: Any = None,
    head_sums: Any = None,
    topk_length: Any = None,
    row_weights: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    causal: Any = True,
    relative: Any = True,
    gradients: Any = True,
    deterministic: Any = False,
    buffer_bytes: Any = 536870912,
    kernel: Any = None,
    *,
    kl: Any = None,
    mass: Any = None,
    index_lse: Any = None,
    d_index_q: Any = None,
    d_index_k: Any = None,
    d_weights: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (
        q,
        k,
        index_q,
        index_k,
        weights,
        indices,
        k_scale,
        q_scale,
        lse,
        head_sums,
        topk_length,
        row_weights,
        cu_seqlens_q,
        cu_seqlens_kv,
        kl,
        mass,
        index_lse,
        d_index_q,
        d_index_k,
        d_weights,
    )
    options = (scale, causal, relative, gradients, deterministic, buffer_bytes, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_sparse_loss"], arrays, options, workspace)


INDEXER_SPARSE_LOSS = Operators(
    BOUND_OPERATIONS["indexer_sparse_loss"],
    _indexer_sparse_loss,
    arguments=(
        "Tensor q, Tensor k, Tensor index_q, Tensor index_k, Tensor weights, Tensor indices, float scale, "
        "Tensor? k_scale=None, Tensor? q_scale=None, Tensor? lse=None, Tensor? head_sums=None, "
        "Tensor? topk_length=None, Tensor? row_weights=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_kv=None, bool causal=True, bool relative=True, bool gradients=True, "
        "bool deterministic=False, int buffer_bytes=536870912, str? kernel=None"
    ),
    results=(
        "Tensor(a!) kl, Tensor(b!) mass, Tensor(c!) index_lse, Tensor(d!)? d_index_q=None, "
        "Tensor(e!)? d_index_k=None, Tensor(f!)? d_weights=None"
    ),
    returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _indexer_topk(
    logits: Any,
    k: Any = 2048,
    ks: Any = None,
    ke: Any = None,
    block_table: Any = None,
    order: Any = "index",
    relative: Any = False,
    page_size: Any = 64,
    keep_first: Any = 0,
    keep_last: Any = 0,
    return_values: Any = True,
    kernel: Any = None,
    *,
    indices: Any = None,
    counts: Any = None,
    values: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (logits, ks, ke, block_table, indices, counts, values)
    options = (k, order, relative, page_size, keep_first, keep_last, return_values, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_topk"], arrays, options, workspace)


INDEXER_TOPK = Operators(
    BOUND_OPERATIONS["indexer_topk"],
    _indexer_topk,
    arguments=(
        "Tensor logits, int k=2048, Tensor? ks=None, Tensor? ke=None, Tensor? block_table=None, "
        'str order="index", bool relative=False, int page_size=64, int keep_first=0, int keep_last=0, '
        "bool return_values=True, str? kernel=None"
    ),
    results="Tensor(a!) indices, Tensor(b!) counts, Tensor(c!)? values=None",
    returns="(Tensor, Tensor, Tensor)",
)


def _indexer_warmup_loss(
    q: Any,
    k: Any,
    index_q: Any,
    index_k: Any,
    weights: Any,
    scale: Any,
    q_rope: Any = None,
    k_rope: Any = None,
    k_scale: Any = None,
    q_scale: Any = None,
    v: Any = None,
    lse: Any = None,
    head_sums: Any = None,
    row_weights: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    target: Any = "head_sum",
    target_scale: Any = 1,
    causal: Any = True,
    gradients: Any = True,
    buffer_bytes: Any = 536870912,
    kernel: Any = None,
    *,
    kl: Any = None,
    mass: Any = None,
    index_lse: Any = None,
    d_index_q: Any = None,
    d_index_k: Any = None,
    d_weights: Any = None,
    out: Any = None,
    attention_lse: Any = None,
    workspace: Any = None,
) -> Invocation:
    arrays = (
        q,
        k,
        index_q,
        index_k,
        weights,
        q_rope,
        k_rope,
        k_scale,
        q_scale,
        v,
        lse,
        head_sums,
        row_weights,
        cu_seqlens_q,
        cu_seqlens_kv,
        kl,
        mass,
        index_lse,
        d_index_q,
        d_index_k,
        d_weights,
        out,
        attention_lse,
    )
    options = (scale, target, target_scale, causal, gradients, buffer_bytes, kernel)
    return Invocation(BOUND_OPERATIONS["indexer_warmup_loss"], arrays, options, workspace)


INDEXER_WARMUP_LOSS = Operators(
    BOUND_OPERATIONS["indexer_warmup_loss"],
    _indexer_warmup_loss,
    arguments=(
        "Tensor q, Tensor k, Tensor index_q, Tensor index_k, Tensor weights, float scale, Tensor? q_rope=None, "
        "Tensor? k_rope=None, Tensor? k_scale=None, Tensor? q_scale=None, Tensor? v=None, Tensor? lse=None, "
        "Tensor? head_sums=None, Tensor? row_weights=None, Tensor? cu_seqlens_q=None, "
        'Tensor? cu_seqlens_kv=None, str target="head_sum", float target_scale=1.0, bool causal=True, '
        "bool gradients=True, int buffer_bytes=536870912, str? kernel=None"
    ),
    results=(
        "Tensor(a!) kl, Tensor(b!) mass, Tensor(c!) index_lse, Tensor(d!)? d_index_q=None, "
        "Tensor(e!)? d_index_k=None, Tensor(f!)? d_weights=None, Tensor(g!)? out=None, "
        "Tensor(h!)? attention_lse=None"
    ),
    returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
