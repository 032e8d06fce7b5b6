"""Attention: dense decode and its plans, the sparse forward and its gradient, merging."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.errors import ArgumentError, PlanError, explain
from mla_cupy.ops import DecodePlan
from mla_cupy.shapes import D_QK
from mla_cupy.torch.derivatives import refuse_tangents, transformed
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import check_kinds, run, targets, with_dtypes
from mla_cupy.torch.plan import TorchDecodePlan, make_plan, run_planned
from mla_cupy.torch.sparse import transformed_forward

__all__ = ["plan_decode"]


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
            plan=None if plan is None else _plan_of(plan),
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
        _plan_of(plan)
        names = ("q", "kv_cache", "block_table", "seqlens", "tree_mask")
        inputs = tuple(check_kinds("mla_decode", dict(zip(names, inputs, strict=True))).values())
        return run_planned(plan, inputs, with_dtypes("mla_decode", check_kinds("mla_decode", options)), given)
    return run("mla_decode", inputs, options, given, workspace)


def _plan_of(plan: Any) -> DecodePlan:
    if not isinstance(plan, TorchDecodePlan):
        remedy = "make it with mla_cupy.torch.plan_decode"
        raise PlanError(explain("plan", repr(plan), "a TorchDecodePlan, or None", remedy))
    return plan.plan


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

    `out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`; `max_logits` counts as a constant. The
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
    if transformed() and not given:
        arrays = {"q": q, "kv": kv, "indices": indices}
        refuse_tangents("sparse_mla_forward", {**arrays, **options})
        taken = check_kinds("sparse_mla_forward", {**arrays, **options})
        return transformed_forward(**with_dtypes("sparse_mla_forward", taken))
    return run("sparse_mla_forward", (q, kv, indices), options, given, workspace)


def sparse_mla_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
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
    q, kv, out, dout, lse, indices, dlse, attn_sink : tensor
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
    options = {**options, "dlse": dlse, "attn_sink": attn_sink}
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
