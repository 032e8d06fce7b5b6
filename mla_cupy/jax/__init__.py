"""The operations as functions of JAX: under `jit`, `grad`, `vmap` and `shard_map`, inside XLA's CUDA graphs.

The functions have the names, the arguments and the meaning of those of `mla_cupy`, with these differences:

- There is no `plan`, `workspace`, `check` or `stream`: XLA owns the memory and the order of the work.
- Arrays for results are not written to: a result takes the array's memory over, as `jax.jit` does with donated
  arguments. Where XLA still needs the array, it copies it first. `cache_append` and others that change an array of the
  caller return it in the same way.
- `exportable=True` makes the call part of what `jax.export` can serialise, see `disabled_checks`.

Kernels are chosen, compiled and loaded while JAX traces. What does not fit raises the errors of `mla_cupy` then; what
goes wrong while the compiled program runs is a `jax.errors.JaxRuntimeError` with the text of ours.

Arrays on the CPU are computed as NumPy arrays are: by a GPU if there is one, else by the oracle. `vmap` runs the calls
one after the other. In `jax.shard_map` a call sees the arrays of its device.

This package needs JAX 0.5 or newer. `import mla_cupy` does not import it.
"""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.cache import (
    cache_append,
    cache_copy_pages,
    cache_gather,
    indexer_cache_append,
    indexer_cache_gather,
    sparse_mla_decode,
)
from mla_cupy.jax.ffi import disabled_checks
from mla_cupy.jax.losses import objective
from mla_cupy.jax.lowering import call
from mla_cupy.jax.sparse import differentiable
from mla_cupy.ops import OPERATIONS

__all__ = [
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
    "disabled_checks",
    "indexer_cache_append",
    "indexer_cache_gather",
    "indexer_head_sums",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_prepare_k",
    "indexer_prepare_q",
    "indexer_sparse_loss",
    "indexer_sparse_objective",
    "indexer_topk",
    "indexer_warmup_loss",
    "indexer_warmup_objective",
    "merge_states",
    "mla_decode",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    seqlens: jax.Array,
    *,
    tree_mask: jax.Array | None = None,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Dense decode over a paged latent cache: see `mla_cupy.mla_decode`.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, tree_mask : array
        A `tree_mask` has 64 bits, which JAX has with `jax_enable_x64` only.
    out, lse : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        d_v, scale, causal, cp_world, cp_rank, kv_scale, out_dtype, lse_base, empty_lse, kernel.

    Returns
    -------
    out, lse : array

    Notes
    -----
    It has no gradient: decode serves inference.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import mla_cupy.jax as mla
    >>> q, cache = jnp.ones((1, 1, 16, 576), jnp.bfloat16), jnp.ones((4, 64, 576), jnp.bfloat16)
    >>> table, seqlens = jnp.array([[2, 0]], jnp.int32), jnp.array([100], jnp.int32)
    >>> out, lse = jax.jit(mla.mla_decode)(q, cache, table, seqlens)
    >>> out.shape, float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 28.605)
    """
    given = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seqlens": seqlens, "tree_mask": tree_mask}
    given |= {"out": out, "lse": lse}
    out, lse = call(OPERATIONS["mla_decode"], given, options, exportable)
    return out, lse


def sparse_mla_forward(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    deterministic: bool = False,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sparse attention over a flat latent cache: see `mla_cupy.sparse_mla_forward`.

    Differentiable by `out` with respect to `q`, `kv` and `attn_sink`; `lse` and `max_logits` count as constants.

    Parameters
    ----------
    q, kv, indices, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv : array
    deterministic : bool
        Of the gradients: see `mla_cupy.sparse_mla_backward`.
    exportable : bool
        For `jax.export`.
    **options
        d_v, scale, causal, out_dtype, lse_base, empty_lse, kernel.

    Returns
    -------
    out, lse, max_logits : array

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import mla_cupy.jax as mla
    >>> q, kv = jnp.ones((2, 16, 576), jnp.bfloat16), jnp.ones((100, 576), jnp.bfloat16)
    >>> indices = jnp.array([[3, 70, -1], [5, -1, -1]], jnp.int32)
    >>> loss = lambda kv: mla.sparse_mla_forward(q, kv, indices)[0].astype(jnp.float32).sum()
    >>> gradient = jax.jit(jax.grad(loss))(kv)
    >>> float(gradient[3, 0]), float(gradient[5, 0]), float(gradient[4, 0])
    (8.0, 16.0, 0.0)
    """
    arrays = (q, kv, indices, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv)
    return differentiable(arrays, options, deterministic, exportable)


def sparse_mla_backward(
    q: jax.Array,
    kv: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    indices: jax.Array,
    *,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    d_sink: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of `sparse_mla_forward`: see `mla_cupy.sparse_mla_backward`.

    `jax.grad` of the forward calls it; call it yourself for options that a gradient has no place for.

    Parameters
    ----------
    q, kv, out, dout, lse, indices, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv : array
    dq, dkv, d_sink : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        d_v, scale, causal, lse_base, deterministic, dkv_dtype, kernel.

    Returns
    -------
    dq, dkv : array
    d_sink : array or None
        None without `attn_sink`.
    """
    inputs = {"q": q, "kv": kv, "out": out, "dout": dout, "lse": lse, "indices": indices}
    optional = {"topk_length": topk_length, "attn_sink": attn_sink}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    given = {**inputs, **optional, **sequences, "dq": dq, "dkv": dkv, "d_sink": d_sink}
    dq, dkv, d_sink = call(OPERATIONS["sparse_mla_backward"], given, options, exportable)
    return dq, dkv, d_sink


def merge_states(
    outs: jax.Array,
    lses: jax.Array,
    *,
    out: jax.Array | None = None,
    lse: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Merge partial results over disjoint sets of keys: see `mla_cupy.merge_states`.

    Parameters
    ----------
    outs, lses : array
    out, lse : array, optional
        Whose memory the results take over.
    exportable : bool
        For `jax.export`.
    **options
        lse_base, empty_lse, out_dtype.

    Returns
    -------
    out, lse : array
    """
    given = {"outs": outs, "lses": lses, "out": out, "lse": lse}
    out, lse = call(OPERATIONS["merge_states"], given, options, exportable)
    return out, lse


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
        clean, out_dtype, kernel. With `clean=False`, give `logits`: the rest of it stays.

    Returns
    -------
    array
    """
    given = {"q": q, "k": k, "weights": weights, "ks": ks, "ke": ke, "k_scale": k_scale, "logits": logits}
    (logits,) = call(OPERATIONS["indexer_logits"], given, options, exportable)
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
    given = {"q": q, "cache": cache, "weights": weights, "seqlens": seqlens, "block_table": block_table}
    (logits,) = call(OPERATIONS["indexer_logits_paged"], {**given, "logits": logits}, options, exportable)
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
    inputs = {"logits": logits, "ks": ks, "ke": ke, "block_table": block_table}
    outputs = {"indices": indices, "counts": counts, "values": values}
    indices, counts, values = call(OPERATIONS["indexer_topk"], {**inputs, **outputs}, {"k": k, **options}, exportable)
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
        interleaved, hadamard, scales, reference_rounding.

    Returns
    -------
    codes, folded : array
    """
    inputs = {"q": q, "weights": weights, "cos": cos, "sin": sin, "positions": positions}
    given = {**inputs, "codes": codes, "folded": folded}
    codes, folded = call(OPERATIONS["indexer_prepare_q"], given, options, exportable)
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
    given = {"k": k, "cos": cos, "sin": sin, "positions": positions, "codes": codes, "k_scale": k_scale}
    codes, k_scale = call(OPERATIONS["indexer_prepare_k"], given, options, exportable)
    return codes, k_scale


def indexer_warmup_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
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
    q, k, index_q, index_k, weights, v, lse, head_sums, row_weights, cu_seqlens_q, cu_seqlens_kv : array
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
    operation = OPERATIONS["indexer_warmup_loss"]
    given = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "v": v}
    optional = {"lse": lse, "head_sums": head_sums, "row_weights": row_weights}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    targets = {output.name: options.pop(output.name, None) for output in operation.outputs}
    return call(operation, {**given, **optional, **sequences, **targets}, options, exportable)


def indexer_warmup_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    *,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """sum(row_weights * kl) of the indexer's warm-up loss, differentiable by index_q, index_k and weights.

    The gradients are made with the loss: its larger part, the scores of the main attention, is not repeated. The
    pull-back multiplies them by the cotangent.

    Parameters
    ----------
    q, k, index_q, index_k, weights, lse, head_sums, cu_seqlens_q, cu_seqlens_kv : array
    row_weights : array, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
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
    given = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "lse": lse}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    arrays = {**given, "head_sums": head_sums, "row_weights": row_weights, **sequences}
    return objective("indexer_warmup_loss", arrays, options, exportable)


def indexer_sparse_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
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
    lse, head_sums, topk_length, row_weights, cu_seqlens_q, cu_seqlens_kv : array, optional
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
    operation = OPERATIONS["indexer_sparse_loss"]
    given = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "indices": indices}
    optional = {"lse": lse, "head_sums": head_sums, "topk_length": topk_length, "row_weights": row_weights}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    targets = {output.name: options.pop(output.name, None) for output in operation.outputs}
    return call(operation, {**given, **optional, **sequences, **targets}, options, exportable)


def indexer_sparse_objective(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_k: jax.Array,
    weights: jax.Array,
    indices: jax.Array,
    *,
    lse: jax.Array | None = None,
    head_sums: jax.Array | None = None,
    topk_length: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_kv: jax.Array | None = None,
    exportable: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """sum(row_weights * kl) of the indexer's loss over selected keys, differentiable by index_q, index_k and weights.

    The gradients are made with the loss; the pull-back multiplies them by the cotangent.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : array
    lse, head_sums, topk_length, cu_seqlens_q, cu_seqlens_kv : array, optional
    row_weights : array, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
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
    given = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "indices": indices}
    optional = {"lse": lse, "head_sums": head_sums, "topk_length": topk_length, "row_weights": row_weights}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    return objective("indexer_sparse_loss", {**given, **optional, **sequences}, options, exportable)


def indexer_head_sums(
    q: jax.Array,
    k: jax.Array,
    *,
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
    indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv : array, optional
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
    inputs = {"q": q, "k": k, "indices": indices, "lse": lse, "topk_length": topk_length, "head_sums": head_sums}
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    (found,) = call(OPERATIONS["indexer_head_sums"], {**inputs, **sequences}, options, exportable)
    return found
