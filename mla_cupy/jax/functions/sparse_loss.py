"""Functions of `mla_cupy.ops.indexer.sparse_loss` for JAX's arrays.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import jax

from mla_cupy.jax.losses import objective
from mla_cupy.jax.lowering import run
from mla_cupy.ops.indexer.sparse_loss import OPERATION


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
    scale: float | None = None,
    causal: bool = False,
    relative: bool = True,
    gradients: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kl: jax.Array | None = None,
    mass: jax.Array | None = None,
    index_lse: jax.Array | None = None,
    d_index_q: jax.Array | None = None,
    d_index_k: jax.Array | None = None,
    d_weights: jax.Array | None = None,
    kernel: str | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Divergence of the indexer's softmax from the main attention over selected keys, with its gradients.

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t], as in `indexer_warmup_loss`, but every sum over s
    is over the keys that `indices` select for token t.

    For arrays of JAX: the notes of `mla_cupy.indexer_sparse_loss` hold here, too.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Absorbed queries of the main attention; d is at most 576. All last axes but those of `weights`, `indices` and
        the scales are contiguous.
    k : array, (s_kv, d), bfloat16
        Its keys, which all heads share.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign; the loss multiplies them by h_i**-0.5 * d_i**-0.5. For codes, with all
        factors.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        As for `sparse_mla_forward`: rows of the sequence's keys, -1 and others outside being skipped. A key that is
        selected twice counts twice.
    k_scale, q_scale : array, (s_kv,) and (s_q, h_i), float32, optional
        Scales of `index_k` and `index_q`, as for `indexer_warmup_loss`, whose notes say what the gradients refer to.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural, such as those of `sparse_mla_forward`; p is normalised again. A head with
        an infinite one has no part in p. Default: computed, over the selected keys.
    head_sums : array, (s_q, topk), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    topk_length : array, (s_q,), int32, optional
        Only the first topk_length[t] entries of a list count; clamped to [0, topk].
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        As for `sparse_mla_forward`.
    scale : float, optional
        Factor of the main attention's scores; default: d**-0.5.
    causal : bool
        Leave out keys after a token's own position.
    relative : bool
        As for `sparse_mla_forward`: True if indices count from the first key of the token's sequence, False if from the
        first of all keys.
    gradients : bool
        Compute the gradients.
    deterministic : bool
        Give `d_index_k` the same bits in every run; all other results have them anyway.
    buffer_bytes : int
        The tokens are processed in chunks whose targets and scores fit; a chunk has at least one token.
    kl, mass, index_lse : array, (s_q,), float32, optional
        Whose memory the results take over.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16 or float32, optional
        Whose memory the results take over.
    d_weights : array, (s_q, h_i), float32, optional
        Whose memory the result takes over.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.
    exportable : bool
        Whether `jax.export` can serialise the call: see `disabled_checks`.

    Returns
    -------
    kl : array, (s_q,), float32
        0 for a token without a target: one that selects no key, or whose target has no mass.
    mass : array, (s_q,), float32
        Divisor of the target.
    index_lse : array, (s_q,), float32
        log(sum_s exp(I[t, s])); -inf for a token that selects no key.
    d_index_q, d_index_k : array, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : array, (s_q, h_i), float32, or None

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Derivatives do not go through it: `indexer_sparse_objective` is differentiable.
    """
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
    kl, mass, index_lse, d_index_q, d_index_k, d_weights = run(OPERATION, arrays, options, exportable)
    return kl, mass, index_lse, d_index_q, d_index_k, d_weights


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
    scale: float | None = None,
    causal: bool = False,
    relative: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[jax.Array, jax.Array] | None = None,
    exportable: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute sum(row_weights * kl) of the loss over selected keys, differentiable by indexer and weights.

    The loss is that of `indexer_sparse_loss`. Its gradients by index_q, index_k and weights are made with it; the
    backward multiplies them by the cotangent, in the dtypes of the arrays. Everything else counts as a constant.

    Parameters
    ----------
    q : array, (s_q, h, d), bfloat16
        Absorbed queries of the main attention; d is at most 576. All last axes but those of `weights`, `indices` and
        the scales are contiguous.
    k : array, (s_kv, d), bfloat16
        Its keys, which all heads share.
    index_q : array, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes.
    index_k : array, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : array, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign; the loss multiplies them by h_i**-0.5 * d_i**-0.5. For codes, with all
        factors.
    indices : array, (s_q, topk) or (s_q, 1, topk), int32
        As for `sparse_mla_forward`: rows of the sequence's keys, -1 and others outside being skipped. A key that is
        selected twice counts twice.
    k_scale, q_scale : array, (s_kv,) and (s_q, h_i), float32, optional
        Scales of `index_k` and `index_q`, as for `indexer_warmup_loss`, whose notes say what the gradients refer to.
    lse : array, (s_q, h), float32, optional
        The attention's log-sum-exps, natural, such as those of `sparse_mla_forward`; p is normalised again. A head with
        an infinite one has no part in p. Default: computed, over the selected keys.
    head_sums : array, (s_q, topk), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    topk_length : array, (s_q,), int32, optional
        Only the first topk_length[t] entries of a list count; clamped to [0, topk].
    row_weights : array, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1. For a mean, 1 / s_q.
    cu_seqlens_q, cu_seqlens_kv : array, (b + 1,), int32, optional
        As for `sparse_mla_forward`.
    scale : float, optional
        Factor of the main attention's scores; default: d**-0.5.
    causal : bool
        Leave out keys after a token's own position.
    relative : bool
        As for `sparse_mla_forward`: True if indices count from the first key of the token's sequence, False if from the
        first of all keys.
    deterministic : bool
        Give `d_index_k` the same bits in every run; all other results have them anyway.
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
    return objective(OPERATION, arrays, options, straight_through, exportable)
