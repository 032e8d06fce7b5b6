"""Dense attention with keys and values per head."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.torch.library import is_plain_call
from mla_cupy.torch.operators import run, targets


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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with keys and values per head: see `mla_cupy.mla_prefill`. It has no gradient yet.

    Parameters
    ----------
    q, k, v : tensor
    q_rope, k_rope, cu_seqlens_q, cu_seqlens_kv, state_out, state_lse : tensor, optional
    out, lse : tensor, optional
        Where the results go: both or none.
    workspace : tensor, uint8, optional
        With `out` and `lse`.
    **options
        causal, scale, out_dtype, kernel.

    Returns
    -------
    out, lse : tensor
    """
    given = targets(out=out, lse=lse)
    optional = {"q_rope": q_rope, "k_rope": k_rope, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    named = {**optional, "state_out": state_out, "state_lse": state_lse, **options}
    if is_plain_call(q):
        return ops.mla_prefill(q, k, v, **named, **given, workspace=workspace)
    return run("mla_prefill", (q, k, v), named, given, workspace)
