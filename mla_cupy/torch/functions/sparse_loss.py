"""Functions of `mla_cupy.ops.indexer.sparse_loss` for PyTorch's tensors.

Written by `python -m tests.generate` from the records there.
"""

from __future__ import annotations

import torch

from mla_cupy.ops.call import Invocation, run
from mla_cupy.ops.indexer.sparse_loss import OPERATION
from mla_cupy.torch.call import call
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.losses import objective
from mla_cupy.torch.operators import INDEXER_SPARSE_LOSS


def indexer_sparse_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    relative: bool = True,
    gradients: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Divergence of the indexer's softmax from the main attention over selected keys, with its gradients.

    kl[t] = sum_s p[t, s] * (log p[t, s] - I[t, s]) + index_lse[t], as in `indexer_warmup_loss`, but every sum over s
    is over the keys that `indices` select for token t.

    For tensors of PyTorch: the notes of `mla_cupy.indexer_sparse_loss` hold here, too.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Absorbed queries of the main attention; d is at most 576. All last axes but those of `weights`, `indices` and
        the scales are contiguous.
    k : tensor, (s_kv, d), bfloat16
        Its keys, which all heads share.
    index_q : tensor, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes.
    index_k : tensor, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : tensor, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign; the loss multiplies them by h_i**-0.5 * d_i**-0.5. For codes, with all
        factors.
    indices : tensor, (s_q, topk) or (s_q, 1, topk), int32
        As for `sparse_mla_forward`: rows of the sequence's keys, -1 and others outside being skipped. A key that is
        selected twice counts twice.
    k_scale, q_scale : tensor, (s_kv,) and (s_q, h_i), float32, optional
        Scales of `index_k` and `index_q`, as for `indexer_warmup_loss`, whose notes say what the gradients refer to.
    lse : tensor, (s_q, h), float32, optional
        The attention's log-sum-exps, natural, such as those of `sparse_mla_forward`; p is normalised again. A head with
        an infinite one has no part in p. Default: computed, over the selected keys.
    head_sums : tensor, (s_q, topk), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    topk_length : tensor, (s_q,), int32, optional
        Only the first topk_length[t] entries of a list count; clamped to [0, topk].
    row_weights : tensor, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
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
    kl, mass, index_lse : tensor, (s_q,), float32, optional
        Where these results go.
    d_index_q, d_index_k : tensor, shapes of index_q and index_k, bfloat16 or float32, optional
        Where the gradients go; the last axes are contiguous.
    d_weights : tensor, (s_q, h_i), float32, optional
        The same.
    workspace : tensor, (n,), uint8, optional
        Memory for the call, 256-byte aligned, of at least `workspace_bytes(indexer_sparse_loss, ...)` bytes.
    kernel : str, optional
        Name of the main kernel to run, see `mla-cupy list`. Default: the fastest that fits.

    Returns
    -------
    kl : tensor, (s_q,), float32
        0 for a token without a target: one that selects no key, or whose target has no mass.
    mass : tensor, (s_q,), float32
        Divisor of the target.
    index_lse : tensor, (s_q,), float32
        log(sum_s exp(I[t, s])); -inf for a token that selects no key.
    d_index_q, d_index_k : tensor, shapes of index_q and index_k, bfloat16; or None
        Gradients of sum(row_weights * kl). None without `gradients`.
    d_weights : tensor, (s_q, h_i), float32, or None

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ArgumentError
        If an argument does not fit; nothing has been launched, and no result is touched.
    UnsupportedDeviceError
        If no kernel fits the GPU.

    Notes
    -----
    Derivatives do not go through it: `indexer_sparse_objective` is differentiable. Tensors for the results are given
    all or none. A `workspace` is for calls with tensors for the results.
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
    if (
        is_plain_call(arrays)
        and not torch.is_grad_enabled()
        and (kl is None) is (mass is None) is (index_lse is None)
        and (gradients is False or (kl is None) is (d_index_q is None) is (d_index_k is None) is (d_weights is None))
    ):
        kl, mass, index_lse, d_index_q, d_index_k, d_weights = run(Invocation(OPERATION, arrays, options, workspace))
    else:
        kl, mass, index_lse, d_index_q, d_index_k, d_weights = call(INDEXER_SPARSE_LOSS, arrays, options, workspace)
    return kl, mass, index_lse, d_index_q, d_index_k, d_weights


def indexer_sparse_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_sums: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    relative: bool = True,
    deterministic: bool = False,
    buffer_bytes: int = 536870912,
    kernel: str | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sum(row_weights * kl) of the loss over selected keys, differentiable by indexer and weights.

    The loss is that of `indexer_sparse_loss`. Its gradients by index_q, index_k and weights are made with it; the
    backward multiplies them by the cotangent, in the dtypes of the arrays. Everything else counts as a constant.

    Parameters
    ----------
    q : tensor, (s_q, h, d), bfloat16
        Absorbed queries of the main attention; d is at most 576. All last axes but those of `weights`, `indices` and
        the scales are contiguous.
    k : tensor, (s_kv, d), bfloat16
        Its keys, which all heads share.
    index_q : tensor, (s_q, h_i, d_i), bfloat16, float8_e4m3fn or uint8
        Queries of the indexer, d_i 32, 64 or 128. uint8 holds e4m3 codes.
    index_k : tensor, (s_kv, d_i), dtype of index_q
        Its keys.
    weights : tensor, (s_q, h_i), float32 or bfloat16
        Weights of its heads, of any sign; the loss multiplies them by h_i**-0.5 * d_i**-0.5. For codes, with all
        factors.
    indices : tensor, (s_q, topk) or (s_q, 1, topk), int32
        As for `sparse_mla_forward`: rows of the sequence's keys, -1 and others outside being skipped. A key that is
        selected twice counts twice.
    k_scale, q_scale : tensor, (s_kv,) and (s_q, h_i), float32, optional
        Scales of `index_k` and `index_q`, as for `indexer_warmup_loss`, whose notes say what the gradients refer to.
    lse : tensor, (s_q, h), float32, optional
        The attention's log-sum-exps, natural, such as those of `sparse_mla_forward`; p is normalised again. A head with
        an infinite one has no part in p. Default: computed, over the selected keys.
    head_sums : tensor, (s_q, topk), float32, optional
        Source of p in place of `q`, `k` and `lse`: the sum of `indexer_head_sums` of all ranks, each of which has a
        share of the attention's heads. The last axis is contiguous.
    topk_length : tensor, (s_q,), int32, optional
        Only the first topk_length[t] entries of a list count; clamped to [0, topk].
    row_weights : tensor, (s_q,), float32, optional
        Factors of the losses in the gradients. Default: 1. For a mean, 1 / s_q.
    cu_seqlens_q, cu_seqlens_kv : tensor, (b + 1,), int32, optional
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
