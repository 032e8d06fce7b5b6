"""The operations as operators of PyTorch: under autograd, `torch.compile` and CUDA graphs.

The functions have the names, the arguments and the meaning of those of `mla_cupy`, with these differences:

- `sparse_mla_forward` is differentiable, and so are the scalars of `indexer_warmup_objective` and
  `indexer_sparse_objective`.
- `torch.compile` sees one operator instead of Python, with `fullgraph=True` and with dynamic batch sizes, too; what an
  operator writes is declared.
- There is no `check` or `stream`: the work goes to PyTorch's current stream. Options that are dtypes are PyTorch's.
- Of the arrays for results, all are given or none. Plans come from `mla_cupy.torch.plan_decode`.

This package needs PyTorch 2.4 or newer. `import mla_cupy` does not import it.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.shapes import D_QK
from mla_cupy.torch.cache import (
    cache_append,
    cache_copy_pages,
    cache_gather,
    indexer_cache_append,
    indexer_cache_gather,
    sparse_mla_decode,
)
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.losses import objective
from mla_cupy.torch.operators import OPERATORS, run, single, targets
from mla_cupy.torch.plan import TorchDecodePlan, make_plan, run_planned
from mla_cupy.torch.sparse import make_differentiable

__all__ = [
    "TorchDecodePlan",
    "cache_append",
    "cache_copy_pages",
    "cache_gather",
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
    "plan_decode",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]

make_differentiable(OPERATORS["sparse_mla_backward"][0])


def plan_decode(
    *,
    max_b: int,
    s_q: int,
    h_q: int,
    h_kv: int = 1,
    d_qk: int = D_QK,
    record: str | None = None,
    max_pages: int,
    page_size: int,
    dtype: Any,
    cp_world: int = 1,
    cp_rank: int = 0,
    tree_mask: bool = False,
    batch_invariant: bool = False,
    split_tokens: int = 4096,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> TorchDecodePlan:
    """Prepare decode steps of one shape: see `mla_cupy.plan_decode`.

    Parameters
    ----------
    max_b, s_q, h_q, h_kv, d_qk, record, max_pages, page_size, dtype, cp_world, cp_rank, tree_mask, batch_invariant
        As there.
    split_tokens, kernel
        As there.
    device : torch.device or str, optional
        PyTorch's. Default: the current GPU, if there is one, else the CPU.

    Returns
    -------
    TorchDecodePlan
    """
    sizes = {"max_b": max_b, "s_q": s_q, "h_q": h_q, "h_kv": h_kv, "d_qk": d_qk, "max_pages": max_pages}
    shard = {"cp_world": cp_world, "cp_rank": cp_rank}
    cuts = {"tree_mask": tree_mask, "batch_invariant": batch_invariant, "split_tokens": split_tokens}
    kind = {"record": record, "page_size": page_size, "dtype": dtype}
    return make_plan(device, **sizes, **kind, **shard, **cuts, kernel=kernel)


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None = None,
    plan: TorchDecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decode over a paged latent cache: see `mla_cupy.mla_decode`.

    Parameters
    ----------
    q, kv_cache, block_table, seqlens, tree_mask : tensor
    plan : TorchDecodePlan, optional
        Updated for these `seqlens`.
    out, lse : tensor, optional
        Where the results go: both or none.
    workspace : tensor, uint8, optional
        With `out` and `lse`, without a plan.
    **options
        d_v, scale, causal, cp_world, cp_rank, kv_scale, out_dtype, lse_base, empty_lse, kernel.

    Returns
    -------
    out, lse : tensor

    Notes
    -----
    It has no gradient: decode serves inference.

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, cache = torch.ones(1, 1, 16, 576).bfloat16(), torch.ones(4, 64, 576).bfloat16()
    >>> table, seqlens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    >>> out, lse = mla.mla_decode(q, cache, table, seqlens)
    >>> tuple(out.shape), float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
    ((1, 1, 16, 512), 1.0, 28.605)
    """
    if is_plain_call(q) and (out is None) is (lse is None):
        return ops.mla_decode(
            q,
            kv_cache,
            block_table,
            seqlens,
            tree_mask=tree_mask,
            plan=None if plan is None else plan.plan,
            out=out,
            lse=lse,
            workspace=workspace,
            **options,
        )
    given = targets(out=out, lse=lse)
    inputs = (q, kv_cache, block_table, seqlens, tree_mask)
    if plan is not None:
        if workspace is not None:
            raise ArgumentError(explain("workspace", "a tensor, with a plan", "None: the plan has its own"))
        return run_planned(plan, inputs, options, given)
    return run("mla_decode", inputs, options, given, workspace)


def sparse_mla_forward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse attention over a flat latent cache: see `mla_cupy.sparse_mla_forward`.

    Differentiable by `out` with respect to `q`, `kv` and `attn_sink`; `lse` and `max_logits` count as constants. The
    gradients are deterministic under `torch.use_deterministic_algorithms(True)`.

    Parameters
    ----------
    q, kv, indices : tensor
    out, lse, max_logits : tensor, optional
        Where the results go: all or none. Without gradients.
    workspace : tensor, uint8, optional
        With these.
    **options
        d_v, scale, topk_length, attn_sink, causal, cu_seqlens_q, cu_seqlens_kv, lse_base, empty_lse, out_dtype,
        kernel.

    Returns
    -------
    out, lse, max_logits : tensor

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, kv = torch.ones(2, 16, 576).bfloat16(), torch.ones(100, 576).bfloat16().requires_grad_()
    >>> indices = torch.tensor([[3, 70, -1], [5, -1, -1]], dtype=torch.int32)
    >>> out, lse, max_logits = mla.sparse_mla_forward(q, kv, indices)
    >>> out.sum().backward()
    >>> float(kv.grad[3, 0]), float(kv.grad[5, 0]), float(kv.grad[4, 0])
    (8.0, 16.0, 0.0)
    """
    given = targets(out=out, lse=lse, max_logits=max_logits)
    if is_plain_call(q) and not torch.is_grad_enabled():
        return ops.sparse_mla_forward(q, kv, indices, **options, **given, workspace=workspace)
    return run("sparse_mla_forward", (q, kv, indices), options, given, workspace)


def sparse_mla_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    *,
    attn_sink: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    d_sink: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of `sparse_mla_forward`: see `mla_cupy.sparse_mla_backward`.

    Autograd calls it; call it yourself for options that autograd has no place for.

    Parameters
    ----------
    q, kv, out, dout, lse, indices, attn_sink : tensor
    dq, dkv, d_sink : tensor, optional
        Where the results go: all, `d_sink` only if there is an `attn_sink`, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        d_v, scale, topk_length, causal, cu_seqlens_q, cu_seqlens_kv, lse_base, deterministic, dkv_dtype, kernel.

    Returns
    -------
    dq, dkv : tensor
    d_sink : tensor or None
        None without `attn_sink`.
    """
    inputs = (q, kv, out, dout, lse, indices)
    given = targets(dq=dq, dkv=dkv) if attn_sink is None else targets(dq=dq, dkv=dkv, d_sink=d_sink)
    options = {**options, "attn_sink": attn_sink}
    dq, dkv, *more = run("sparse_mla_backward", inputs, options, given, workspace)
    return dq, dkv, more[0] if attn_sink is not None else None


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over disjoint sets of keys: see `mla_cupy.merge_states`.

    Parameters
    ----------
    outs, lses : tensor
    out, lse : tensor, optional
        Where the results go: both or none.
    **options
        lse_base, empty_lse, out_dtype.

    Returns
    -------
    out, lse : tensor
    """
    given = targets(out=out, lse=lse)
    if is_plain_call(outs):
        return ops.merge_states(outs, lses, **options, **given)
    return run("merge_states", (outs, lses), options, given, None)


def indexer_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Scores of the lightning indexer: see `mla_cupy.indexer_logits`.

    Parameters
    ----------
    q, k, weights : tensor
    ks, ke, k_scale : tensor, optional
    logits : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `logits`.
    **options
        accumulate, clean, out_dtype, kernel.

    Returns
    -------
    tensor
    """
    given = targets(logits=logits)
    if is_plain_call(q):
        return ops.indexer_logits(q, k, weights, ks, ke, k_scale=k_scale, **options, **given, workspace=workspace)
    optional = {"ks": ks, "ke": ke, "k_scale": k_scale}
    return single(run("indexer_logits", (q, k, weights), {**optional, **options}, given, workspace))


def indexer_logits_paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    seqlens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Scores of cached index keys: see `mla_cupy.indexer_logits_paged`.

    Parameters
    ----------
    q, cache, weights, seqlens, block_table : tensor
    logits : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `logits`.
    **options
        clean, out_dtype, kernel.

    Returns
    -------
    tensor
    """
    inputs, given = (q, cache, weights, seqlens, block_table), targets(logits=logits)
    if is_plain_call(q):
        return ops.indexer_logits_paged(
            q, cache, weights, seqlens, block_table, **options, **given, workspace=workspace
        )
    return single(run("indexer_logits_paged", inputs, options, given, workspace))


def indexer_prepare_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
    folded: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and folded weights of index queries: see `mla_cupy.indexer_prepare_q`.

    Parameters
    ----------
    q, weights, cos, sin, positions : tensor
    codes, folded : tensor, optional
        Where the results go: both or none.
    **options
        interleaved, hadamard, scales, reference_rounding, accumulate.

    Returns
    -------
    codes, folded : tensor
    """
    inputs, given = (q, weights, cos, sin, positions), targets(codes=codes, folded=folded)
    if is_plain_call(q):
        return ops.indexer_prepare_q(q, weights, cos, sin, positions, **options, **given)
    return run("indexer_prepare_q", inputs, options, given, None)


def indexer_prepare_k(
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of index keys: see `mla_cupy.indexer_prepare_k`.

    Parameters
    ----------
    k, cos, sin, positions : tensor
    codes, k_scale : tensor, optional
        Where the results go: both or none.
    **options
        interleaved, hadamard, scales, reference_rounding.

    Returns
    -------
    codes, k_scale : tensor
    """
    inputs, given = (k, cos, sin, positions), targets(codes=codes, k_scale=k_scale)
    if is_plain_call(k):
        return ops.indexer_prepare_k(k, cos, sin, positions, **options, **given)
    return run("indexer_prepare_k", inputs, options, given, None)


def indexer_topk(
    logits: torch.Tensor,
    k: int = 2048,
    *,
    ks: torch.Tensor | None = None,
    ke: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    return_values: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Exact top-k of the indexer's logits: see `mla_cupy.indexer_topk`.

    Parameters
    ----------
    logits : tensor
    k : int
    ks, ke, block_table : tensor, optional
    indices, counts, values : tensor, optional
        Where the results go: all or none.
    return_values : bool
    **options
        order, relative, page_size, keep_first, keep_last, kernel.

    Returns
    -------
    indices, counts : tensor
    values : tensor or None
        None without `return_values`.

    Notes
    -----
    It has no gradient.
    """
    chosen = {"return_values": return_values, **options}
    given = targets(indices=indices, counts=counts, **({"values": values} if return_values else {}))
    if is_plain_call(logits):
        found = ops.indexer_topk(logits, k, ks=ks, ke=ke, block_table=block_table, **chosen, **given)
    else:
        found = run("indexer_topk", (logits, k, ks, ke, block_table), chosen, given, None)
    return found[0], found[1], found[2] if return_values else None


def indexer_warmup_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    v: torch.Tensor | None = None,
    gradients: bool = True,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    attention_lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The indexer's warm-up loss and its gradients: see `mla_cupy.indexer_warmup_loss`.

    Autograd does not look into it: `indexer_warmup_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights, v : tensor
    gradients : bool
    kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse : tensor, optional
        Where the results go: all that there are, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        lse, head_sums, row_weights, cu_seqlens_q, cu_seqlens_kv, target, scale, target_scale, causal, buffer_bytes,
        kernel.

    Returns
    -------
    kl, mass, index_lse : tensor
    d_index_q, d_index_k, d_weights : tensor or None
        None without `gradients`.
    out, attention_lse : tensor or None
        None without `v`.
    """
    losses = {"kl": kl, "mass": mass, "index_lse": index_lse}
    backward = {"d_index_q": d_index_q, "d_index_k": d_index_k, "d_weights": d_weights} if gradients else {}
    attention = {} if v is None else {"out": out, "attention_lse": attention_lse}
    given = targets(**losses, **backward, **attention)
    inputs = tuple(x.detach() for x in (q, k, index_q, index_k, weights))
    chosen = {"v": None if v is None else v.detach(), "gradients": gradients, **options}
    found = run("indexer_warmup_loss", inputs, chosen, given, workspace)
    there = [True] * 3 + [gradients] * 3 + [v is not None] * 2
    if given:
        rest = iter(found)
        return tuple(next(rest) if is_there else None for is_there in there)
    return tuple(x if is_there else None for x, is_there in zip(found, there, strict=True))


def indexer_warmup_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(row_weights * kl) of the indexer's warm-up loss, differentiable by index_q, index_k and weights.

    The gradients are made in the forward: its larger part, the scores of the main attention, is not repeated. The
    backward multiplies them by the cotangent, in the dtypes of the arrays.

    Parameters
    ----------
    q, k, index_q, index_k, weights : tensor
    row_weights : tensor, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    **options
        Of `indexer_warmup_loss`: lse, head_sums, cu_seqlens_q, cu_seqlens_kv, target, scale, target_scale, causal,
        buffer_bytes, kernel.

    Returns
    -------
    objective : tensor, (), float32
    kl : tensor
        Without a gradient.
    """
    leaves = (index_q, index_k, weights)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    found = indexer_warmup_loss(q, k, *leaves, gradients=wanted, row_weights=row_weights, **options)
    kl, _, _, *gradients, _, _ = found
    assert kl is not None
    return objective(leaves, kl, row_weights, tuple(gradients)), kl


def indexer_sparse_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    gradients: bool = True,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The indexer's loss over selected keys and its gradients: see `mla_cupy.indexer_sparse_loss`.

    Autograd does not look into it: `indexer_sparse_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : tensor
    gradients : bool
    kl, mass, index_lse, d_index_q, d_index_k, d_weights : tensor, optional
        Where the results go: all that there are, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        lse, head_sums, topk_length, row_weights, cu_seqlens_q, cu_seqlens_kv, scale, causal, deterministic,
        buffer_bytes, kernel.

    Returns
    -------
    kl, mass, index_lse : tensor
    d_index_q, d_index_k, d_weights : tensor or None
        None without `gradients`.
    """
    losses = {"kl": kl, "mass": mass, "index_lse": index_lse}
    backward = {"d_index_q": d_index_q, "d_index_k": d_index_k, "d_weights": d_weights} if gradients else {}
    given = targets(**losses, **backward)
    inputs = (*(x.detach() for x in (q, k, index_q, index_k, weights)), indices)
    found = run("indexer_sparse_loss", inputs, {"gradients": gradients, **options}, given, workspace)
    return tuple(found[:6]) if gradients else (*found[:3], None, None, None)


def indexer_sparse_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(row_weights * kl) of the indexer's loss over selected keys, differentiable by index_q, index_k and weights.

    The gradients are made in the forward; the backward multiplies them by the cotangent, in the dtypes of the arrays.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : tensor
    row_weights : tensor, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    **options
        Of `indexer_sparse_loss`: lse, head_sums, topk_length, cu_seqlens_q, cu_seqlens_kv, scale, causal,
        deterministic, buffer_bytes, kernel.

    Returns
    -------
    objective : tensor, (), float32
    kl : tensor
        Without a gradient.
    """
    leaves = (index_q, index_k, weights)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    found = indexer_sparse_loss(q, k, *leaves, indices, gradients=wanted, row_weights=row_weights, **options)
    kl, _, _, *gradients = found
    assert kl is not None
    return objective(leaves, kl, row_weights, tuple(gradients)), kl


def indexer_head_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    head_sums: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """What the indexer's losses normalise to their target, of one rank's heads: see `mla_cupy.indexer_head_sums`.

    Parameters
    ----------
    q, k : tensor
    head_sums : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `head_sums`.
    **options
        indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, scale, causal, buffer_bytes, kernel.

    Returns
    -------
    tensor

    Notes
    -----
    It has no gradient: nothing flows to the main attention.
    """
    given = targets(head_sums=head_sums)
    return single(run("indexer_head_sums", (q.detach(), k.detach()), options, given, workspace))
