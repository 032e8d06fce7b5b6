"""Attention: dense decode, the sparse forward and its gradient, merging."""

from __future__ import annotations

from typing import Any

import jax

from mla_cupy.jax.lowering import run
from mla_cupy.jax.sparse import differentiable


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
    out, lse = run("mla_decode", locals())
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

    `out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`.

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
    dlse: jax.Array | None = None,
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
    q, kv, out, dout, lse, indices, dlse, topk_length, attn_sink, cu_seqlens_q, cu_seqlens_kv : array
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
    dq, dkv, d_sink = run("sparse_mla_backward", locals())
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
    out, lse = run("merge_states", locals())
    return out, lse
