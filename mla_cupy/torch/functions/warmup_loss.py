"""Functions of `mla_cupy.ops.indexer.warmup_loss` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.warmup_loss import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.losses import objective
from mla_cupy.torch.operators import INDEXER_WARMUP_LOSS


def indexer_warmup_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    target: str = "head_sum",
    scale: float | None = None,
    target_scale: float = 1,
    causal: bool = True,
    gradients: bool = True,
    buffer_bytes: int = 536870912,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    attention_lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Divergence of the indexer's softmax from the main attention, over all keys, with its gradients in the same call.

    With I[t, s] = sum_j W[t, j] * max(index_q[t, j] . index_k[s], 0), W = weights * h_i**-0.5 * d_i**-0.5, and
    p[t, s] = sum_h exp(scale * q[t, h] . k[s] - lse[t, h]) / mass[t], whose sum over s is 1:

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t],   index_lse[t] = log(sum_s exp(I[t, s]))

    For tensors of PyTorch: the notes of `mla_cupy.indexer_warmup_loss` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Queries of the main attention, absorbed or not; d is at most 576. With `q_rope`, all columns but the last 64.
        The last axes of all tensors but `weights` and the scales are contiguous.
    k : tensor, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Its keys: those that all heads share, as of absorbed queries, (s_kv, 576); or un-absorbed, (s_kv, h, 192), where
        each KV head serves h / h_kv heads. With `k_rope`, all columns but the last 64.
    index_q : tensor, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes: see the notes.
    index_k : tensor, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : tensor, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign, without the factors of W; for codes, with all factors.
    q_rope : tensor, (s_q, h, 64), bfloat16, optional
        The queries' last columns, as for `mla_prefill`.
    k_rope : tensor, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), bfloat16, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    k_scale : tensor, (s_kv,), float32, optional
        Scales of `index_k`, such as its codes', above 0: factors of the scores. Default: 1.
    q_scale : tensor, (s_q, h_i), float32, optional
        Scales of `index_q` that `weights` contain, above 0: with them `d_index_q` is the gradient with respect to
        q_scale * index_q. Default: 1, the gradient with respect to index_q. Nothing else depends on them.
    v : tensor, (s_kv, d_v), or per KV head (s_kv, h_kv, d_v), bfloat16, optional
        Values of the main attention, d_v at most 512, for `out` and `attention_lse`; of as many heads as `k`. They may
        be part of `k`.
    lse : tensor, (s_q, h), float32, optional
        The attention's log-sum-exps, natural. They may count keys that are not among `k`: p is normalised again. A head
        with an infinite one has no part in p. Default: computed, over the keys that are seen.
    head_sums : tensor, (s_q, s_kv), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    row_weights : tensor, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
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
    kl, mass, index_lse : tensor, (s_q,) or per head (s_q, h), float32, optional
        Where these results go.
    d_index_q, d_index_k : tensor, shapes of index_q and index_k, bfloat16 or float32, optional
        Where the gradients go, in these dtypes for codes, too; the last axes are contiguous.
    d_weights : tensor, (s_q, h_i), float32, optional
        The same.
    out : tensor, (s_q, h, d_v), bfloat16, optional
        Where the attention's output goes; the last axis is contiguous.
    attention_lse : tensor, (s_q, h), float32, optional
        Where its log-sum-exps go.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_warmup_loss, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    kl : tensor, (s_q,) or per head (s_q, h), float32
        0 for a row without a target: one that sees no key, or whose target has no mass.
    mass : tensor, shape of kl, float32
        Divisor of the target. Per head: the log-sum-exp of its scores.
    index_lse : tensor, shape of kl, float32
        -inf for a row that sees no key.
    d_index_q, d_index_k : tensor, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : tensor, (s_q, h_i), float32, or None
        In float32 for weights of either dtype.
    out : tensor, (s_q, h, d_v), bfloat16, or None
        softmax(scale * q . k) v, 0 for a row that sees no key. None without `v`.
    attention_lse : tensor, (s_q, h), float32, or None
        log(sum_s exp(scale * q . k)), natural, -inf for a row that sees no key. None without `v`.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Derivatives do not go through it: `indexer_warmup_objective` is differentiable. Tensors for the results are given
    all or none. A `workspace` is for calls with tensors for the results.
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
    if (
        is_plain_call(arrays)
        and not torch.is_grad_enabled()
        and (kl is None) is (mass is None) is (index_lse is None)
        and (gradients is False or (kl is None) is (d_index_q is None) is (d_index_k is None) is (d_weights is None))
        and (v is None or (kl is None) is (out is None) is (attention_lse is None))
    ):
        kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = run(
            Invocation(OPERATION, arrays, options, workspace)
        )
    else:
        kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse = call(
            INDEXER_WARMUP_LOSS, arrays, options, workspace
        )
    return kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse


def indexer_warmup_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    target: str = "head_sum",
    scale: float | None = None,
    target_scale: float = 1,
    causal: bool = True,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sum(row_weights * kl) of the warm-up loss, differentiable by indexer and weights.

    The loss is that of `indexer_warmup_loss`. Its gradients by index_q, index_k and weights are made with it: its
    larger part, the scores of the main attention, is not repeated. The backward multiplies them by the cotangent, in
    the dtypes of the arrays. Everything else counts as a constant.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Queries of the main attention, absorbed or not; d is at most 576. With `q_rope`, all columns but the last 64.
        The last axes of all tensors but `weights` and the scales are contiguous.
    k : tensor, (s_kv, d), or per KV head (s_kv, h_kv, d), bfloat16
        Its keys: those that all heads share, as of absorbed queries, (s_kv, 576); or un-absorbed, (s_kv, h, 192), where
        each KV head serves h / h_kv heads. With `k_rope`, all columns but the last 64.
    index_q : tensor, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes: see the notes.
    index_k : tensor, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : tensor, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign, without the factors of W; for codes, with all factors.
    q_rope : tensor, (s_q, h, 64), bfloat16, optional
        The queries' last columns, as for `mla_prefill`.
    k_rope : tensor, (s_kv, 64), (s_kv, 1, 64) or (s_kv, h_kv, 64), bfloat16, optional
        Last 64 columns of the keys: the same for all heads, or those of each head.
    k_scale : tensor, (s_kv,), float32, optional
        Scales of `index_k`, such as its codes', above 0: factors of the scores. Default: 1.
    q_scale : tensor, (s_q, h_i), float32, optional
        Scales of `index_q` that `weights` contain, above 0: with them `d_index_q` is the gradient with respect to
        q_scale * index_q. Default: 1, the gradient with respect to index_q. Nothing else depends on them.
    lse : tensor, (s_q, h), float32, optional
        The attention's log-sum-exps, natural. They may count keys that are not among `k`: p is normalised again. A head
        with an infinite one has no part in p. Default: computed, over the keys that are seen.
    head_sums : tensor, (s_q, s_kv), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    row_weights : tensor, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1. For a mean, 1 / s_q.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
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
    straight_through : (tensor, tensor), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.

    Returns
    -------
    objective : tensor, (), float32
        sum(row_weights * kl).
    kl : tensor, (s_q,) or per head (s_q, h), float32
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
    return objective(INDEXER_WARMUP_LOSS, arrays, options, straight_through)
