"""The lightning indexer: its queries, keys, logits, top-k and losses."""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.losses import objective
from mla_cupy.jax.lowering import run

__all__ = ["indexer_sparse_objective", "indexer_warmup_objective"]


def indexer_logits(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    ks: jax.Array | None = None,
    ke: jax.Array | None = None,
    *,
    k_scale: jax.Array | None = None,
    logits: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """Scores of the lightning indexer: see `mla_cupy.indexer_logits`.

    Parameters
    ----------
    q, k, weights : array
    ks, ke, k_scale : array, optional
    logits : array, optional
        Whose memory the result takes over.
    exportable : bool
        For `jax.export`.
    **options
        accumulate, clean, out_dtype, kernel. With `clean=False`, give `logits`: the rest of it stays.

    Returns
    -------
    array
    """
    (logits,) = run("indexer_logits", locals())
    return logits


def indexer_logits_paged(
    q: jax.Array,
    cache: jax.Array,
    weights: jax.Array,
    seqlens: jax.Array,
    block_table: jax.Array,
    *,
    logits: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """Scores of cached index keys: see `mla_cupy.indexer_logits_paged`.

    Parameters
    ----------
    q, cache, weights, seqlens, block_table : array
    logits : array, optional
        Whose memory the result takes over.
    exportable : bool
        For `jax.export`.
    **options
        clean, out_dtype, kernel.

    Returns
    -------
    array
    """
    (logits,) = run("indexer_logits_paged", locals())
    return logits


def indexer_topk(
    logits: jax.Array,
    k: int = 2048,
    *,
    ks: jax.Array | None = None,
    ke: jax.Array | None = None,
    block_table: jax.Array | None = None,
    indices: jax.Array | None = None,
    counts: jax.Array | None = None,
    values: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Exact top-k of the indexer's logits: see `mla_cupy.indexer_topk`.

    Parameters
    ----------
    logits : array
    k : int
    ks, ke, block_table : array, optional
    indices, counts, values : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        order, relative, page_size, keep_first, keep_last, return_values, kernel.

    Returns
    -------
    indices, counts : array
    values : array or None
        None without `return_values`.

    Notes
    -----
    It has no gradient.
    """
    indices, counts, values = run("indexer_topk", locals())
    return indices, counts, values


def indexer_prepare_q(
    q: jax.Array,
    weights: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    codes: jax.Array | None = None,
    folded: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Codes and folded weights of index queries: see `mla_cupy.indexer_prepare_q`.

    Parameters
    ----------
    q, weights, cos, sin, positions : array
    codes, folded : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        interleaved, hadamard, scales, reference_rounding, accumulate.

    Returns
    -------
    codes, folded : array
    """
    codes, folded = run("indexer_prepare_q", locals())
    return codes, folded


def indexer_prepare_k(
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    positions: jax.Array,
    *,
    codes: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of index keys: see `mla_cupy.indexer_prepare_k`.

    Parameters
    ----------
    k, cos, sin, positions : array
    codes, k_scale : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        interleaved, hadamard, scales, reference_rounding.

    Returns
    -------
    codes, k_scale : array
    """
    codes, k_scale = run("indexer_prepare_k", locals())
    return codes, k_scale


def indexer_warmup_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    v: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    """The indexer's warm-up loss and its gradients: see `mla_cupy.indexer_warmup_loss`.

    `jax.grad` does not go through it: `indexer_warmup_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights : array
    q_rope, k_rope, k_scale, q_scale, v, lse, head_sums, row_weights, cu_seqlens_q, cu_seqlens_kv : array, optional
    exportable : bool
        For `jax.export`.
    **options
        target, scale, target_scale, causal, gradients, buffer_bytes, kernel; and arrays whose memory results take over.

    Returns
    -------
    kl, mass, index_lse : array
    d_index_q, d_index_k, d_weights : array or None
        None without `gradients`.
    out, attention_lse : array or None
        None without `v`.
    """
    return run("indexer_warmup_loss", locals())


def indexer_warmup_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """sum(row_weights * kl) of the indexer's warm-up loss, differentiable by index_q, index_k and weights.

    The gradients are made with the loss: its larger part, the scores of the main attention, is not repeated. The
    pull-back multiplies them by the cotangent.

    Parameters
    ----------
    q, k, index_q, index_k, weights : array
    q_rope, k_rope, k_scale, q_scale, lse, head_sums, cu_seqlens_q, cu_seqlens_kv : array, optional
    row_weights : array, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    straight_through : (array, array), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.
    exportable : bool
        For `jax.export`.
    **options
        target, scale, target_scale, causal, buffer_bytes, kernel.

    Returns
    -------
    objective : array, (), float32
    kl : array
        Without a gradient.
    """
    return objective("indexer_warmup_loss", locals())


def indexer_sparse_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array | None, ...]:
    """The indexer's loss over selected keys and its gradients: see `mla_cupy.indexer_sparse_loss`.

    `jax.grad` does not go through it: `indexer_sparse_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : array
    k_scale, q_scale, lse, head_sums, topk_length, row_weights, cu_seqlens_q, cu_seqlens_kv : array, optional
    exportable : bool
        For `jax.export`.
    **options
        scale, causal, gradients, deterministic, buffer_bytes, kernel; and arrays whose memory results take over.

    Returns
    -------
    kl, mass, index_lse : array
    d_index_q, d_index_k, d_weights : array or None
        None without `gradients`.
    """
    return run("indexer_sparse_loss", locals())


def indexer_sparse_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """sum(row_weights * kl) of the indexer's loss over selected keys, differentiable by index_q, index_k and weights.

    The gradients are made with the loss; the pull-back multiplies them by the cotangent.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : array
    k_scale, q_scale, lse, head_sums, topk_length, cu_seqlens_q, cu_seqlens_kv : array, optional
    row_weights : array, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    straight_through : (array, array), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.
    exportable : bool
        For `jax.export`.
    **options
        scale, causal, deterministic, buffer_bytes, kernel.

    Returns
    -------
    objective : array, (), float32
    kl : array
        Without a gradient.
    """
    return objective("indexer_sparse_loss", locals())


def indexer_head_sums(
    q: jax.Array,
    k: jax.Array,
    *,
    q_rope: jax.Array | None = None,
    k_rope: jax.Array | None = None,
    indices: jax.Array | None = None,
    lse: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> jax.Array:
    """What the indexer's losses normalise to their target, of one rank's heads: see `mla_cupy.indexer_head_sums`.

    In `jax.shard_map` over the heads, `jax.lax.psum` of it is what the losses take as `head_sums`.

    Parameters
    ----------
    q, k : array
    q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv : array, optional
    head_sums : array, optional
        Whose memory the result takes over.
    exportable : bool
        For `jax.export`.
    **options
        scale, causal, buffer_bytes, kernel.

    Returns
    -------
    array

    Notes
    -----
    It has no gradient: nothing flows to the main attention.
    """
    (found,) = run("indexer_head_sums", locals())
    return found
