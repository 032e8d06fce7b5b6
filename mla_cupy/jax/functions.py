"""The operations as functions of JAX's arrays. Their docstrings are made from `mla_cupy`'s.

Written by `python -m tools.generate` from the operations' records.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from mla_cupy.jax.docstrings import documented
from mla_cupy.jax.gradients import prefill as prefill_gradient
from mla_cupy.jax.gradients import sparse_forward as sparse_forward_gradient
from mla_cupy.jax.losses import objective
from mla_cupy.jax.lowering import run
from mla_cupy.ops import BOUND_OPERATIONS
from mla_cupy.ops.groups import Fp8, LossResults, OutRope, Packed, Project, Shard, taken
from mla_cupy.ops.indexer.loss_inputs import SparseLoss, WarmupLoss
from mla_cupy.ops.operation import with_scales


@documented
def cache_append(
    latent: jax.Array,
    rope: jax.Array | None,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    interleaved: bool = True,
    exportable: bool = False,
) -> jax.Array:
    arrays = (latent, rope, cache, slots, cos, sin, positions)
    options = (kv_format, scales, kv_scale, interleaved)
    (cache,) = run(BOUND_OPERATIONS["cache_append"], arrays, options, exportable)
    return cache


@documented
def cache_gather(
    cache: jax.Array,
    slots: jax.Array,
    *,
    kv_format: str | None = None,
    kv_scale: float = 1,
    out: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> jax.Array:
    arrays = (cache, slots, out)
    options = (kv_format, kv_scale, out_dtype)
    (out,) = run(BOUND_OPERATIONS["cache_gather"], arrays, options, exportable)
    return out


@documented
def cache_copy_pages(pool: jax.Array, pairs: jax.Array, *, exportable: bool = False) -> jax.Array:
    arrays = (pool, pairs)
    options = ()
    (pool,) = run(BOUND_OPERATIONS["cache_copy_pages"], arrays, options, exportable)
    return pool


@documented
def cache_slots(
    block_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
    slots: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (block_table, starts, lengths, slots, cu_seqlens)
    options = (page_size, max_tokens, num_pages)
    slots, cu_seqlens = run(BOUND_OPERATIONS["cache_slots"], arrays, options, exportable)
    return slots, cu_seqlens


@documented
def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    seqlens: jax.Array,
    *,
    scale: float,
    q_rope: jax.Array | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    shard: Shard | None = None,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_scales: jax.Array | None = None,
    out_dtype: Any = None,
    scales: str = "plain",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, ...]:
    cu_seqlens_q, max_seqlen_q = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "max_seqlen_q"))
    )
    out_cos, out_sin, out_positions = (
        (None, None, None)
        if out_rope is None
        else taken(out_rope, OutRope, "out_rope", ("out_cos", "out_sin", "out_positions"))
    )
    w_uv, gate = (None, None) if project is None else taken(project, Project, "project", ("w_uv", "gate"))
    math, q_scale, kv_scale, q_scales, kv_scales, kv_format = (
        ("exact", 1, 1, None, None, None)
        if fp8 is None
        else taken(fp8, Fp8, "fp8", ("math", "q_scale", "kv_scale", "q_scales", "kv_scales", "kv_format"))
    )
    cp_world, cp_rank = (1, 0) if shard is None else taken(shard, Shard, "shard", ("cp_world", "cp_rank"))
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
    out, lse, out_scales = run(BOUND_OPERATIONS["mla_decode"], arrays, options, exportable)
    return with_scales(out, lse, out_scales)


@documented
def prefill_mask(
    indices: jax.Array,
    max_keys: int,
    *,
    packed: Packed | None = None,
    relative: bool = False,
    mask: jax.Array | None = None,
    exportable: bool = False,
) -> jax.Array:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (indices, cu_seqlens_q, cu_seqlens_kv, mask)
    options = (max_keys, relative)
    (mask,) = run(BOUND_OPERATIONS["prefill_mask"], arrays, options, exportable)
    return mask


@documented
def merge_states(
    outs: jax.Array,
    lses: jax.Array,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (outs, lses, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    out, lse = run(BOUND_OPERATIONS["merge_states"], arrays, options, exportable)
    return out, lse


@documented
def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    packed: Packed | None = None,
    state_out: jax.Array | None = None,
    state_lse: jax.Array | None = None,
    mask: jax.Array | None = None,
    q_scales: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    segment_ids_q: jax.Array | None = None,
    segment_ids_kv: jax.Array | None = None,
    max_segments: int | None = None,
    deterministic: bool = False,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
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
    out, lse = prefill_gradient.differentiable(
        arrays, options, deterministic, exportable, segment_ids_q, segment_ids_kv, max_segments
    )
    return out, lse


@documented
def mla_prefill_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    dlse: jax.Array | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    dq: jax.Array | None = None,
    dk: jax.Array | None = None,
    dv: jax.Array | None = None,
    dq_rope: jax.Array | None = None,
    dk_rope: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, dq_rope, dk_rope)
    options = (causal, scale, deterministic, kernel)
    dq, dk, dv, dq_rope, dk_rope = run(BOUND_OPERATIONS["mla_prefill_backward"], arrays, options, exportable)
    return dq, dk, dv, dq_rope, dk_rope


@documented
def mla_prepare(
    q: jax.Array,
    latent: jax.Array | None = None,
    rope: jax.Array | None = None,
    cache: jax.Array | None = None,
    slots: jax.Array | None = None,
    *,
    q_rope: jax.Array | None = None,
    w_uk: jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    out: jax.Array | None = None,
    q_scales: jax.Array | None = None,
    rope_out: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    arrays = (q, latent, rope, cache, slots, q_rope, w_uk, cos, sin, positions, out, q_scales, rope_out)
    options = (theta, interleaved, quantise, q_scale, return_rope, kv_format, scales, kv_scale)
    out, q_scales, rope_out, cache = run(BOUND_OPERATIONS["mla_prepare"], arrays, options, exportable)
    return out, q_scales, rope_out, cache


@documented
def absorb(
    q_nope: jax.Array,
    w_uk: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    out: jax.Array | None = None,
    exportable: bool = False,
) -> jax.Array:
    arrays = (q_nope, w_uk, q_rope, out)
    options = ()
    (out,) = run(BOUND_OPERATIONS["absorb"], arrays, options, exportable)
    return out


@documented
def merge_project(
    outs: jax.Array,
    w_uv: jax.Array,
    *,
    lses: jax.Array | None = None,
    gate: jax.Array | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_dtype: Any = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    arrays = (outs, w_uv, lses, gate, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    out, lse = run(BOUND_OPERATIONS["merge_project"], arrays, options, exportable)
    return out, lse


@documented
def prefill_segments(
    segment_ids_q: jax.Array,
    max_segments: int,
    *,
    segment_ids_kv: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (segment_ids_q, segment_ids_kv, cu_seqlens_q, cu_seqlens_kv)
    options = (max_segments,)
    cu_seqlens_q, cu_seqlens_kv = run(BOUND_OPERATIONS["prefill_segments"], arrays, options, exportable)
    return cu_seqlens_q, cu_seqlens_kv


@documented
def sparse_mla_backward(
    q: jax.Array,
    kv: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    dlse: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: Any = None,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    d_sink: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
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
    dq, dkv, d_sink = run(BOUND_OPERATIONS["sparse_mla_backward"], arrays, options, exportable)
    return dq, dkv, d_sink


@documented
def sparse_mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    out_scales: jax.Array | None = None,
    out_dtype: Any = None,
    scales: str = "plain",
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, ...]:
    out_cos, out_sin, out_positions = (
        (None, None, None)
        if out_rope is None
        else taken(out_rope, OutRope, "out_rope", ("out_cos", "out_sin", "out_positions"))
    )
    w_uv, gate = (None, None) if project is None else taken(project, Project, "project", ("w_uv", "gate"))
    math, kv_scale, kv_format = (
        ("exact", 1, None) if fp8 is None else taken(fp8, Fp8, "fp8", ("math", "kv_scale", "kv_format"))
    )
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
    out, lse, out_scales = run(BOUND_OPERATIONS["sparse_mla_decode"], arrays, options, exportable)
    return with_scales(out, lse, out_scales)


@documented
def sparse_mla_forward(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    max_logits: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    deterministic: bool = False,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    math, kv_scale, kv_format = (
        ("exact", 1, None) if fp8 is None else taken(fp8, Fp8, "fp8", ("math", "kv_scale", "kv_format"))
    )
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
    out, lse, max_logits = sparse_forward_gradient.differentiable(arrays, options, deterministic, exportable)
    return out, lse, max_logits


@documented
def indexer_head_sums(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    indices: jax.Array | None = None,
    lse: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    buffer_bytes: int = 536870912,
    head_sums: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> jax.Array:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (q, k, q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, head_sums)
    options = (scale, causal, relative, buffer_bytes, kernel)
    (head_sums,) = run(BOUND_OPERATIONS["indexer_head_sums"], arrays, options, exportable)
    return head_sums


@documented
def indexer_cache_append(
    k: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    eps: float = 1e-06,
    exportable: bool = False,
) -> jax.Array:
    arrays = (k, cache, slots, cos, sin, positions, norm_weight, norm_bias)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    (cache,) = run(BOUND_OPERATIONS["indexer_cache_append"], arrays, options, exportable)
    return cache


@documented
def indexer_cache_gather(
    cache: jax.Array,
    slots: jax.Array,
    *,
    d: int | None = None,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (cache, slots, codes, k_scale)
    options = (d,)
    codes, k_scale = run(BOUND_OPERATIONS["indexer_cache_gather"], arrays, options, exportable)
    return codes, k_scale


@documented
def indexer_logits(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    ks: jax.Array | None = None,
    ke: jax.Array | None = None,
    *,
    k_scale: jax.Array | None = None,
    accumulate: str = "float32",
    clean: bool = True,
    logits: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> jax.Array:
    arrays = (q, k, weights, ks, ke, k_scale, logits)
    options = (accumulate, clean, out_dtype, kernel)
    (logits,) = run(BOUND_OPERATIONS["indexer_logits"], arrays, options, exportable)
    return logits


@documented
def indexer_logits_paged(
    q: jax.Array,
    cache: jax.Array,
    weights: jax.Array,
    seqlens: jax.Array,
    block_table: jax.Array,
    *,
    clean: bool = True,
    logits: jax.Array | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> jax.Array:
    arrays = (q, cache, weights, seqlens, block_table, logits)
    options = (clean, out_dtype, kernel)
    (logits,) = run(BOUND_OPERATIONS["indexer_logits_paged"], arrays, options, exportable)
    return logits


@documented
def indexer_prepare_q(
    q: jax.Array,
    weights: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    codes: jax.Array | None = None,
    folded: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (q, weights, cos, sin, positions, codes, folded)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate)
    codes, folded = run(BOUND_OPERATIONS["indexer_prepare_q"], arrays, options, exportable)
    return codes, folded


@documented
def indexer_prepare_k(
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    eps: float = 1e-06,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    arrays = (k, cos, sin, positions, norm_weight, norm_bias, codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    codes, k_scale = run(BOUND_OPERATIONS["indexer_prepare_k"], arrays, options, exportable)
    return codes, k_scale


@documented
def indexer_prepare(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    cache: jax.Array | None = None,
    slots: jax.Array | None = None,
    *,
    norm_weight: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    eps: float = 1e-06,
    return_k: bool = False,
    codes: jax.Array | None = None,
    folded: jax.Array | None = None,
    k_codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    arrays = (q, weights, k, cos, sin, positions, cache, slots, norm_weight, norm_bias, codes, folded, k_codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate, eps, return_k)
    codes, folded, k_codes, k_scale, cache = run(BOUND_OPERATIONS["indexer_prepare"], arrays, options, exportable)
    return codes, folded, k_codes, k_scale, cache


@documented
def indexer_sparse_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    gradients: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    results: LossResults | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> SparseLoss:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    kl, mass, index_lse, d_index_q, d_index_k, d_weights = (
        (None, None, None, None, None, None)
        if results is None
        else taken(results, LossResults, "results", ("kl", "mass", "index_lse", "d_index_q", "d_index_k", "d_weights"))
    )
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
    kl, mass, index_lse, d_index_q, d_index_k, d_weights = run(
        BOUND_OPERATIONS["indexer_sparse_loss"], arrays, options, exportable
    )
    return SparseLoss(kl, mass, index_lse, d_index_q, d_index_k, d_weights)


@documented
def indexer_topk(
    logits: jax.Array,
    k: int = 2048,
    *,
    ks: jax.Array | None = None,
    ke: jax.Array | None = None,
    block_table: jax.Array | None = None,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
    indices: jax.Array | None = None,
    counts: jax.Array | None = None,
    values: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    arrays = (logits, ks, ke, block_table, indices, counts, values)
    options = (k, order, relative, page_size, keep_first, keep_last, return_values, kernel)
    indices, counts, values = run(BOUND_OPERATIONS["indexer_topk"], arrays, options, exportable)
    return indices, counts, values


@documented
def indexer_warmup_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
    scale: float,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    v: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    packed: Packed | None = None,
    target: str = "head_sum",
    target_scale: float = 1,
    causal: bool = True,
    gradients: bool = True,
    buffer_bytes: int = 536870912,
    results: LossResults | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> WarmupLoss:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = (
        (None, None, None, None, None, None, None, None)
        if results is None
        else taken(
            results,
            LossResults,
            "results",
            ("kl", "mass", "index_lse", "d_index_q", "d_index_k", "d_weights", "out", "attention_lse"),
        )
    )
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
    kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = run(
        BOUND_OPERATIONS["indexer_warmup_loss"], arrays, options, exportable
    )
    return WarmupLoss(kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse)


@documented
def indexer_sparse_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
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
    )
    options = (scale, causal, relative, True, deterministic, buffer_bytes, kernel)
    return objective(BOUND_OPERATIONS["indexer_sparse_loss"], arrays, options, straight_through, exportable)


@documented
def indexer_warmup_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
    scale: float,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    packed: Packed | None = None,
    target: str = "head_sum",
    target_scale: float = 1,
    causal: bool = True,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
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
        None,
        lse,
        head_sums,
        row_weights,
        cu_seqlens_q,
        cu_seqlens_kv,
    )
    options = (scale, target, target_scale, causal, True, buffer_bytes, kernel)
    return objective(BOUND_OPERATIONS["indexer_warmup_loss"], arrays, options, straight_through, exportable)
