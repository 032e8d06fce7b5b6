"""The operations as functions of PyTorch's tensors. Their docstrings are made from `mla_cupy`'s.

Written by `python -m tools.generate` from the operations' records.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.groups import Fp8, LossResults, OutRope, Packed, Project, Shard, taken
from mla_cupy.ops.indexer.loss_inputs import SparseLoss, WarmupLoss
from mla_cupy.ops.operation import with_scales
from mla_cupy.torch.call import call
from mla_cupy.torch.docstrings import documented
from mla_cupy.torch.gradients import prefill as prefill_gradient
from mla_cupy.torch.gradients import sparse_forward as sparse_forward_gradient
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.losses import objective
from mla_cupy.torch.operators import (
    ABSORB,
    CACHE_APPEND,
    CACHE_COPY_PAGES,
    CACHE_GATHER,
    CACHE_SLOTS,
    INDEXER_CACHE_APPEND,
    INDEXER_CACHE_GATHER,
    INDEXER_HEAD_SUMS,
    INDEXER_LOGITS,
    INDEXER_LOGITS_PAGED,
    INDEXER_PREPARE,
    INDEXER_PREPARE_K,
    INDEXER_PREPARE_Q,
    INDEXER_SPARSE_LOSS,
    INDEXER_TOPK,
    INDEXER_WARMUP_LOSS,
    MERGE_PROJECT,
    MERGE_STATES,
    MLA_DECODE,
    MLA_PREFILL,
    MLA_PREFILL_BACKWARD,
    MLA_PREPARE,
    PREFILL_MASK,
    PREFILL_SEGMENTS,
    SPARSE_MLA_BACKWARD,
    SPARSE_MLA_DECODE,
    SPARSE_MLA_FORWARD,
)
from mla_cupy.torch.plan import TorchDecodePlan, call_planned, plan_of


@documented
def cache_append(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    interleaved: bool = True,
) -> None:
    arrays = (latent, rope, cache, slots, cos, sin, positions)
    options = (kv_format, scales, kv_scale, interleaved)
    if is_plain_call(arrays):
        run(Invocation(CACHE_APPEND.operation, arrays, options))
    else:
        call(CACHE_APPEND, arrays, options)


@documented
def cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_format: str | None = None,
    kv_scale: float = 1,
    out: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> torch.Tensor:
    arrays = (cache, slots, out)
    options = (kv_format, kv_scale, out_dtype)
    if is_plain_call(arrays):
        (out,) = run(Invocation(CACHE_GATHER.operation, arrays, options))
    else:
        (out,) = call(CACHE_GATHER, arrays, options)
    return out


@documented
def cache_copy_pages(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    arrays = (pool, pairs)
    options = ()
    if is_plain_call(arrays):
        run(Invocation(CACHE_COPY_PAGES.operation, arrays, options))
    else:
        call(CACHE_COPY_PAGES, arrays, options)


@documented
def cache_slots(
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    num_pages: int | None = None,
    slots: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (block_table, starts, lengths, slots, cu_seqlens)
    options = (page_size, max_tokens, num_pages)
    if is_plain_call(arrays) and (slots is None) is (cu_seqlens is None):
        slots, cu_seqlens = run(Invocation(CACHE_SLOTS.operation, arrays, options))
    else:
        slots, cu_seqlens = call(CACHE_SLOTS, arrays, options)
    return slots, cu_seqlens


@documented
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    scale: float,
    q_rope: torch.Tensor | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    shard: Shard | None = None,
    plan: TorchDecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    scales: str = "plain",
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    kernel: str | None = None,
) -> tuple[torch.Tensor, ...]:
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
    if (
        is_plain_call(arrays)
        and (out is None) is (lse is None)
        and (out_dtype is None or (out is None) is (out_scales is None))
    ):
        out, lse, out_scales = run(Invocation(MLA_DECODE.operation, arrays, options, workspace, plan=plan_of(plan)))
    elif plan is not None:
        out, lse, out_scales = call_planned(plan, arrays, options, workspace)
    else:
        out, lse, out_scales = call(MLA_DECODE, arrays, options, workspace)
    return with_scales(out, lse, out_scales)


@documented
def prefill_mask(
    indices: torch.Tensor,
    max_keys: int,
    *,
    packed: Packed | None = None,
    relative: bool = False,
    mask: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (indices, cu_seqlens_q, cu_seqlens_kv, mask)
    options = (max_keys, relative)
    if is_plain_call(arrays):
        (mask,) = run(Invocation(PREFILL_MASK.operation, arrays, options, workspace))
    else:
        (mask,) = call(PREFILL_MASK, arrays, options, workspace)
    return mask


@documented
def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (outs, lses, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    if is_plain_call(arrays) and (out is None) is (lse is None):
        out, lse = run(Invocation(MERGE_STATES.operation, arrays, options, workspace))
    else:
        out, lse = call(MERGE_STATES, arrays, options, workspace)
    return out, lse


@documented
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    packed: Packed | None = None,
    state_out: torch.Tensor | None = None,
    state_lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    if is_plain_call(arrays) and not torch.is_grad_enabled() and (out is None) is (lse is None):
        out, lse = run(Invocation(MLA_PREFILL.operation, arrays, options, workspace))
    else:
        out, lse = call(MLA_PREFILL, arrays, options, workspace, gradient=prefill_gradient.transformed)
    return out, lse


@documented
def mla_prefill_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    scale: float | None = None,
    deterministic: bool = False,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dq_rope: torch.Tensor | None = None,
    dk_rope: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (q, k, v, out, dout, lse, q_rope, k_rope, dlse, cu_seqlens_q, cu_seqlens_kv, dq, dk, dv, dq_rope, dk_rope)
    options = (causal, scale, deterministic, kernel)
    if (
        is_plain_call(arrays)
        and (dq is None) is (dk is None) is (dv is None)
        and (q_rope is None or (dq is None) is (dq_rope is None))
        and (k_rope is None or (dq is None) is (dk_rope is None))
    ):
        dq, dk, dv, dq_rope, dk_rope = run(Invocation(MLA_PREFILL_BACKWARD.operation, arrays, options, workspace))
    else:
        dq, dk, dv, dq_rope, dk_rope = call(MLA_PREFILL_BACKWARD, arrays, options, workspace)
    return dq, dk, dv, dq_rope, dk_rope


@documented
def mla_prepare(
    q: torch.Tensor,
    latent: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    q_rope: torch.Tensor | None = None,
    w_uk: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    theta: float | None = None,
    interleaved: bool = True,
    quantise: bool = False,
    q_scale: float | None = None,
    return_rope: bool = False,
    kv_format: str | None = None,
    scales: str | None = None,
    kv_scale: float = 1,
    out: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    rope_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    arrays = (q, latent, rope, cache, slots, q_rope, w_uk, cos, sin, positions, out, q_scales, rope_out)
    options = (theta, interleaved, quantise, q_scale, return_rope, kv_format, scales, kv_scale)
    if (
        is_plain_call(arrays)
        and (quantise is False or (out is None) is (q_scales is None))
        and (return_rope is False or (out is None) is (rope_out is None))
    ):
        out, q_scales, rope_out = run(Invocation(MLA_PREPARE.operation, arrays, options))
    else:
        out, q_scales, rope_out = call(MLA_PREPARE, arrays, options)
    return out, q_scales, rope_out


@documented
def absorb(
    q_nope: torch.Tensor,
    w_uk: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    arrays = (q_nope, w_uk, q_rope, out)
    options = ()
    if is_plain_call(arrays):
        (out,) = run(Invocation(ABSORB.operation, arrays, options, workspace))
    else:
        (out,) = call(ABSORB, arrays, options, workspace)
    return out


@documented
def merge_project(
    outs: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    lses: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    arrays = (outs, w_uv, lses, gate, out, lse)
    options = (lse_base, empty_lse, out_dtype)
    if is_plain_call(arrays) and (lses is None or (out is None) is (lse is None)):
        out, lse = run(Invocation(MERGE_PROJECT.operation, arrays, options, workspace))
    else:
        out, lse = call(MERGE_PROJECT, arrays, options, workspace)
    return out, lse


@documented
def prefill_segments(
    segment_ids_q: torch.Tensor,
    max_segments: int,
    *,
    segment_ids_kv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (segment_ids_q, segment_ids_kv, cu_seqlens_q, cu_seqlens_kv)
    options = (max_segments,)
    if is_plain_call(arrays) and (cu_seqlens_q is None) is (cu_seqlens_kv is None):
        cu_seqlens_q, cu_seqlens_kv = run(Invocation(PREFILL_SEGMENTS.operation, arrays, options, workspace))
    else:
        cu_seqlens_q, cu_seqlens_kv = call(PREFILL_SEGMENTS, arrays, options, workspace)
    return cu_seqlens_q, cu_seqlens_kv


@documented
def sparse_mla_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    dlse: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    lse_base: str = "e",
    deterministic: bool = False,
    dkv_dtype: Any = None,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    d_sink: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
    if (
        is_plain_call(arrays)
        and (dq is None) is (dkv is None)
        and (attn_sink is None or (dq is None) is (d_sink is None))
    ):
        dq, dkv, d_sink = run(Invocation(SPARSE_MLA_BACKWARD.operation, arrays, options, workspace))
    else:
        dq, dkv, d_sink = call(SPARSE_MLA_BACKWARD, arrays, options, workspace)
    return dq, dkv, d_sink


@documented
def sparse_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out_rope: OutRope | None = None,
    project: Project | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    scales: str = "plain",
    kernel: str | None = None,
) -> tuple[torch.Tensor, ...]:
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
    if (
        is_plain_call(arrays)
        and (out is None) is (lse is None)
        and (out_dtype is None or (out is None) is (out_scales is None))
    ):
        out, lse, out_scales = run(Invocation(SPARSE_MLA_DECODE.operation, arrays, options, workspace))
    else:
        out, lse, out_scales = call(SPARSE_MLA_DECODE, arrays, options, workspace)
    return with_scales(out, lse, out_scales)


@documented
def sparse_mla_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    causal: bool = False,
    relative: bool = True,
    packed: Packed | None = None,
    fp8: Fp8 | None = None,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    if is_plain_call(arrays) and not torch.is_grad_enabled() and (out is None) is (lse is None) is (max_logits is None):
        out, lse, max_logits = run(Invocation(SPARSE_MLA_FORWARD.operation, arrays, options, workspace))
    else:
        out, lse, max_logits = call(
            SPARSE_MLA_FORWARD, arrays, options, workspace, gradient=sparse_forward_gradient.transformed
        )
    return out, lse, max_logits


@documented
def indexer_head_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    buffer_bytes: int = 536870912,
    head_sums: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    cu_seqlens_q, cu_seqlens_kv = (
        (None, None) if packed is None else taken(packed, Packed, "packed", ("cu_seqlens_q", "cu_seqlens_kv"))
    )
    arrays = (q, k, q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, head_sums)
    options = (scale, causal, relative, buffer_bytes, kernel)
    if is_plain_call(arrays) and not torch.is_grad_enabled():
        (head_sums,) = run(Invocation(INDEXER_HEAD_SUMS.operation, arrays, options, workspace))
    else:
        (head_sums,) = call(INDEXER_HEAD_SUMS, arrays, options, workspace)
    return head_sums


@documented
def indexer_cache_append(
    k: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    eps: float = 1e-06,
) -> None:
    arrays = (k, cache, slots, cos, sin, positions, norm_weight, norm_bias)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    if is_plain_call(arrays):
        run(Invocation(INDEXER_CACHE_APPEND.operation, arrays, options))
    else:
        call(INDEXER_CACHE_APPEND, arrays, options)


@documented
def indexer_cache_gather(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    d: int | None = None,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (cache, slots, codes, k_scale)
    options = (d,)
    if is_plain_call(arrays) and (codes is None) is (k_scale is None):
        codes, k_scale = run(Invocation(INDEXER_CACHE_GATHER.operation, arrays, options))
    else:
        codes, k_scale = call(INDEXER_CACHE_GATHER, arrays, options)
    return codes, k_scale


@documented
def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    accumulate: str = "float32",
    clean: bool = True,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> torch.Tensor:
    arrays = (q, k, weights, ks, ke, k_scale, logits)
    options = (accumulate, clean, out_dtype, kernel)
    if is_plain_call(arrays):
        (logits,) = run(Invocation(INDEXER_LOGITS.operation, arrays, options, workspace))
    else:
        (logits,) = call(INDEXER_LOGITS, arrays, options, workspace)
    return logits


@documented
def indexer_logits_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seqlens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    clean: bool = True,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out_dtype: Any = None,
    kernel: str | None = None,
) -> torch.Tensor:
    arrays = (q, cache, weights, seqlens, block_table, logits)
    options = (clean, out_dtype, kernel)
    if is_plain_call(arrays):
        (logits,) = run(Invocation(INDEXER_LOGITS_PAGED.operation, arrays, options, workspace))
    else:
        (logits,) = call(INDEXER_LOGITS_PAGED, arrays, options, workspace)
    return logits


@documented
def indexer_prepare_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (q, weights, cos, sin, positions, codes, folded)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate)
    if is_plain_call(arrays) and (codes is None) is (folded is None):
        codes, folded = run(Invocation(INDEXER_PREPARE_Q.operation, arrays, options, workspace))
    else:
        codes, folded = call(INDEXER_PREPARE_Q, arrays, options, workspace)
    return codes, folded


@documented
def indexer_prepare_k(
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-06,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (k, cos, sin, positions, norm_weight, norm_bias, codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, eps)
    if is_plain_call(arrays) and (codes is None) is (k_scale is None):
        codes, k_scale = run(Invocation(INDEXER_PREPARE_K.operation, arrays, options, workspace))
    else:
        codes, k_scale = call(INDEXER_PREPARE_K, arrays, options, workspace)
    return codes, k_scale


@documented
def indexer_prepare(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    hadamard: bool = True,
    scales: str = "power_of_2",
    reference_rounding: bool = True,
    accumulate: str = "float32",
    eps: float = 1e-06,
    return_k: bool = False,
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    k_codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    arrays = (q, weights, k, cos, sin, positions, cache, slots, norm_weight, norm_bias, codes, folded, k_codes, k_scale)
    options = (interleaved, hadamard, scales, reference_rounding, accumulate, eps, return_k)
    if (
        is_plain_call(arrays)
        and (codes is None) is (folded is None)
        and (return_k is False or (codes is None) is (k_codes is None) is (k_scale is None))
    ):
        codes, folded, k_codes, k_scale = run(Invocation(INDEXER_PREPARE.operation, arrays, options))
    else:
        codes, folded, k_codes, k_scale = call(INDEXER_PREPARE, arrays, options)
    return codes, folded, k_codes, k_scale


@documented
def indexer_sparse_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    gradients: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    results: LossResults | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
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
    if (
        is_plain_call(arrays)
        and not torch.is_grad_enabled()
        and (kl is None) is (mass is None) is (index_lse is None)
        and (gradients is False or (kl is None) is (d_index_q is None) is (d_index_k is None) is (d_weights is None))
    ):
        kl, mass, index_lse, d_index_q, d_index_k, d_weights = run(
            Invocation(INDEXER_SPARSE_LOSS.operation, arrays, options, workspace)
        )
    else:
        kl, mass, index_lse, d_index_q, d_index_k, d_weights = call(INDEXER_SPARSE_LOSS, arrays, options, workspace)
    return SparseLoss(kl, mass, index_lse, d_index_q, d_index_k, d_weights)


@documented
def indexer_topk(
    logits: torch.Tensor,
    k: int = 2048,
    *,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    order: str = "index",
    relative: bool = False,
    page_size: int = 64,
    keep_first: int = 0,
    keep_last: int = 0,
    return_values: bool = True,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    arrays = (logits, ks, ke, block_table, indices, counts, values)
    options = (k, order, relative, page_size, keep_first, keep_last, return_values, kernel)
    if (
        is_plain_call(arrays)
        and (indices is None) is (counts is None)
        and (return_values is False or (indices is None) is (values is None))
    ):
        indices, counts, values = run(Invocation(INDEXER_TOPK.operation, arrays, options, workspace))
    else:
        indices, counts, values = call(INDEXER_TOPK, arrays, options, workspace)
    return indices, counts, values


@documented
def indexer_warmup_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale: float,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    packed: Packed | None = None,
    target: str = "head_sum",
    target_scale: float = 1,
    causal: bool = True,
    gradients: bool = True,
    buffer_bytes: int = 536870912,
    results: LossResults | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
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
    if (
        is_plain_call(arrays)
        and not torch.is_grad_enabled()
        and (kl is None) is (mass is None) is (index_lse is None)
        and (gradients is False or (kl is None) is (d_index_q is None) is (d_index_k is None) is (d_weights is None))
        and (v is None or (kl is None) is (out is None) is (attention_lse is None))
    ):
        kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = run(
            Invocation(INDEXER_WARMUP_LOSS.operation, arrays, options, workspace)
        )
    else:
        kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = call(
            INDEXER_WARMUP_LOSS, arrays, options, workspace
        )
    return WarmupLoss(kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse)


@documented
def indexer_sparse_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    packed: Packed | None = None,
    causal: bool = True,
    relative: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    return objective(INDEXER_SPARSE_LOSS, arrays, options, straight_through)


@documented
def indexer_warmup_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale: float,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    packed: Packed | None = None,
    target: str = "head_sum",
    target_scale: float = 1,
    causal: bool = True,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    return objective(INDEXER_WARMUP_LOSS, arrays, options, straight_through)
