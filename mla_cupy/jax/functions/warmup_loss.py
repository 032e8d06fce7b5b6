"""Functions of `mla_cupy.ops.indexer.warmup_loss` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.losses import objective
from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.warmup_loss import OPERATION


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
    target: str = "head_sum",
    scale: float | None = None,
    target_scale: float = 1,
    causal: bool = True,
    gradients: bool = True,
    buffer_bytes: int = 536870912,
    kl: jax.Array | None = None,
    mass: jax.Array | None = None,
    index_lse: jax.Array | None = None,
    d_index_q: jax.Array | None = None,
    d_index_k: jax.Array | None = None,
    d_weights: jax.Array | None = None,
    out: jax.Array | None = None,
    attention_lse: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[
    jax.Array,
    jax.Array,
    jax.Array,
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
]:
    """Divergence of the indexer's softmax from the main attention, over all keys, with its gradients in the same call.

    With I[t, s] = sum_j W[t, j] * max(index_q[t, j] . index_k[s], 0), W = weights * h_i**-0.5 * d_i**-0.5, and
    p[t, s] = sum_h exp(scale * q[t, h] . k[s] - lse[t, h]) / mass[t], whose sum over s is 1:

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t],   index_lse[t] = log(sum_s exp(I[t, s]))

    For arrays of JAX: the notes of `mla_cupy.indexer_warmup_loss` hold here, too.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Queries of the main attention, absorbed or not; d is at most 576. With `q_rope`, all columns but the last 64.
        The last axes of all arrays but `weights` and the scales are contiguous.
    k : array, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Its keys: those that all heads share, as of absorbed queries, (s_kv, 576); or un-absorbed, (s_kv, h, 192), where
        each KV head serves h / h_kv heads. With `k_rope`, all columns but the last 64.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes: see the notes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign, without the factors of W; for codes, with all factors.
    q_rope : array, (s_q, h, 64), bfloat16, optional
        The queries' last columns, as for `mla_prefill`.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), bfloat16, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    k_scale : array, (s_kv,), float32, optional
        Scales of `index_k`, such as its codes', above 0: factors of the scores. Default: 1.
    q_scale : array, (s_q, h_i), float32, optional
        Scales of `index_q` that `weights` contain, above 0: with them `d_index_q` is the gradient with respect to
        q_scale * index_q. Default: 1, the gradient with respect to index_q. Nothing else depends on them.
    v : array, (s_kv, d_v), or per KV head (s_kv, h_kv, d_v), bfloat16, optional
        Values of the main attention, d_v at most 512, for `out` and `attention_lse`; of as many heads as `k`. They may
        be part of `k`.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural. They may count keys that are not among `k`: p is normalised again. A head
        with an infinite one has no part in p. Default: computed, over the keys that are seen.
    head_sums : array, (s_q, s_kv), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Where the sequences begin, and where the last one ends, in the queries and in the keys. Default: one sequence.
    target : str
        "head_sum", as above, or "per_head": of as many index heads as attention heads, each has its own target
        softmax(target_scale * q[t, h] . k) and I[t, h, s] = weights[t, h] * max(index_q[t, h] . index_k[s], 0).
    scale : float, optional
        Factor of the main attention's scores; default: d**-0.5.
    target_scale : float
        The same for the targets of "per_head".
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence.
    gradients : bool
        Compute the gradients.
    buffer_bytes : int
        The tokens are processed in chunks whose targets and scores fit; a chunk has at least one token.
    kl, mass, index_lse : array, (s_q,) or per head (s_q, h), float32, optional
        Whose memory the results take over.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16 or float32, optional
        Whose memory the results take over.
    d_weights : array, (s_q, h_i), float32, optional
        Whose memory the result takes over.
    out : array, (s_q, h, d_v), bfloat16, optional
        Whose memory the result takes over.
    attention_lse : array, (s_q, h), float32, optional
        Whose memory the result takes over.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    kl : array, (s_q,) or per head (s_q, h), float32
        0 for a row without a target: one that sees no key, or whose target has no mass.
    mass : array, shape of kl, float32
        Divisor of the target. Per head: the log-sum-exp of its scores.
    index_lse : array, shape of kl, float32
        -inf for a row that sees no key.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : array, (s_q, h_i), float32, or None
        In float32 for weights of either dtype.
    out : array, (s_q, h, d_v), bfloat16, or None
        softmax(scale * q . k) v, 0 for a row that sees no key. None without `v`.
    attention_lse : array, (s_q, h), float32, or None
        log(sum_s exp(scale * q . k)), natural, -inf for a row that sees no key. None without `v`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Derivatives do not go through it: `indexer_warmup_objective` is differentiable.
    """
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
    options = (target, scale, target_scale, causal, gradients, buffer_bytes, kernel)
    kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = run(
        OPERATION, arrays, options, exportable
    )
    return kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse


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
    target: str = "head_sum",
    scale: float | None = None,
    target_scale: float = 1,
    causal: bool = True,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute sum(row_weights * kl) of the warm-up loss, differentiable by indexer and weights.

    The loss is that of `indexer_warmup_loss`. Its gradients by index_q, index_k and weights are made with it: its
    larger part, the scores of the main attention, is not repeated. The backward multiplies them by the cotangent, in
    the dtypes of the arrays. Everything else counts as a constant.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Queries of the main attention, absorbed or not; d is at most 576. With `q_rope`, all columns but the last 64.
        The last axes of all arrays but `weights` and the scales are contiguous.
    k : array, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Its keys: those that all heads share, as of absorbed queries, (s_kv, 576); or un-absorbed, (s_kv, h, 192), where
        each KV head serves h / h_kv heads. With `k_rope`, all columns but the last 64.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes: see the notes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign, without the factors of W; for codes, with all factors.
    q_rope : array, (s_q, h, 64), bfloat16, optional
        The queries' last columns, as for `mla_prefill`.
    k_rope : array, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), bfloat16, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    k_scale : array, (s_kv,), float32, optional
        Scales of `index_k`, such as its codes', above 0: factors of the scores. Default: 1.
    q_scale : array, (s_q, h_i), float32, optional
        Scales of `index_q` that `weights` contain, above 0: with them `d_index_q` is the gradient with respect to
        q_scale * index_q. Default: 1, the gradient with respect to index_q. Nothing else depends on them.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural. They may count keys that are not among `k`: p is normalised again. A head
        with an infinite one has no part in p. Default: computed, over the keys that are seen.
    head_sums : array, (s_q, s_kv), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1. For a mean, 1 / s_q.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        Where the sequences begin, and where the last one ends, in the queries and in the keys. Default: one sequence.
    target : str
        "head_sum", as above, or "per_head": of as many index heads as attention heads, each has its own target
        softmax(target_scale * q[t, h] . k) and I[t, h, s] = weights[t, h] * max(index_q[t, h] . index_k[s], 0).
    scale : float, optional
        Factor of the main attention's scores; default: d**-0.5.
    target_scale : float
        The same for the targets of "per_head".
    causal : bool
        Hide the keys after a query's own position, the queries being the last of their sequence.
    buffer_bytes : int
        The tokens are processed in chunks whose targets and scores fit; a chunk has at least one token.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    straight_through : (array, array), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    objective : array, (), float32
        sum(row_weights * kl).
    kl : array, (s_q,) or per head (s_q, h), float32
        Without a gradient.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.
    """
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
    options = (target, scale, target_scale, causal, True, buffer_bytes, kernel)
    return objective(OPERATION, arrays, options, straight_through, exportable)
