"""Dense attention with keys and values per head, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.torch.dense import transformed_prefill
from mla_cupy.torch.derivatives import refuse, refuse_tangents, transformed
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import check_kinds, run, single, targets, with_dtypes


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    state_out: torch.Tensor | None = None,
    state_lse: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with keys and values per head: see `mla_cupy.mla_prefill`.

    `out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask. The
    gradients are deterministic under `torch.use_deterministic_algorithms(True)`.

    Parameters
    ----------
    q, k, v : tensor
    q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, state_out, state_lse, mask : tensor, optional
    out, lse : tensor, optional
        Where the results go: both or none. Without gradients.
    workspace : tensor, uint8, optional
        With `out` and `lse`.
    **options
        causal, scale, out_dtype, kernel.

    Returns
    -------
    out, lse : tensor

    Examples
    --------
    >>> import torch
    >>> import mla_cupy.torch as mla
    >>> q, v = torch.ones(3, 4, 192).bfloat16(), torch.ones(3, 4, 128).bfloat16().requires_grad_()
    >>> out, lse = mla.mla_prefill(q, torch.ones_like(q), v)
    >>> out.sum().backward()
    >>> [round(float(x), 2) for x in v.grad[:, 0, 0]]  # of the queries: one, a half, a third
    [1.84, 0.84, 0.33]
    """
    given = targets(out=out, lse=lse)
    optional = {"q_rope": q_rope, "k_rope": k_rope, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    named = {**optional, "state_out": state_out, "state_lse": state_lse, "mask": mask, **options}
    if mask is not None:
        refuse("mla_prefill with a mask", {"q": q, "k": k, "v": v, **named})
    if is_plain_call(q) and not torch.is_grad_enabled():
        return ops.mla_prefill(q, k, v, **named, **given, workspace=workspace)
    if transformed() and not given:
        arrays = {"q": q, "k": k, "v": v, **named}
        refuse_tangents("mla_prefill", arrays)
        return transformed_prefill(**with_dtypes("mla_prefill", check_kinds("mla_prefill", arrays)))
    return run("mla_prefill", (q, k, v), named, given, workspace)


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
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dq_rope: torch.Tensor | None = None,
    dk_rope: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `mla_prefill`: see `mla_cupy.mla_prefill_backward`.

    Autograd calls it; call it yourself to say where the gradients go, such as dk and dv to one tensor.

    Parameters
    ----------
    q, k, v, out, dout, lse, q_rope, k_rope, dlse : tensor
    dq, dk, dv, dq_rope, dk_rope : tensor, optional
        Where the results go: all that there are, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        cu_seqlens_q, cu_seqlens_kv, causal, scale, deterministic, kernel.

    Returns
    -------
    dq, dk, dv : tensor
    dq_rope, dk_rope : tensor or None
        None without `q_rope` or `k_rope`.
    """
    ropes = {"dq_rope": (q_rope, dq_rope), "dk_rope": (k_rope, dk_rope)}
    wanted = {name: target for name, (rope, target) in ropes.items() if rope is not None}
    given = targets(dq=dq, dk=dk, dv=dv, **wanted)
    named = {"q_rope": q_rope, "k_rope": k_rope, "dlse": dlse, **options}
    made = run("mla_prefill_backward", (q, k, v, out, dout, lse), named, given, workspace)
    if given:
        return tuple(given.get(name) for name in ("dq", "dk", "dv", "dq_rope", "dk_rope"))
    lacking = (False, False, False, q_rope is None, k_rope is None)
    return tuple(None if absent else x for x, absent in zip(made, lacking, strict=True))


def prefill_mask(
    indices: torch.Tensor,
    max_keys: int,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The mask of the keys that indices select: see `mla_cupy.prefill_mask`.

    Parameters
    ----------
    indices : tensor
    max_keys : int
    cu_seqlens_q, cu_seqlens_kv : tensor, optional
    mask : tensor, optional
        Where the result goes.
    **options
        relative.

    Returns
    -------
    tensor
    """
    given = targets(mask=mask)
    named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv, **options}
    if is_plain_call(indices):
        return ops.prefill_mask(indices, max_keys, **named, **given)
    return single(run("prefill_mask", (indices,), {"max_keys": max_keys, **named}, given, None))
