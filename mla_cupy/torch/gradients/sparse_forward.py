"""The gradient of the sparse forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy.torch.derivatives import no_gradient
from mla_cupy.torch.gradients.register import Made, backward_of, register
from mla_cupy.torch.operators import SPARSE_MLA_BACKWARD, SPARSE_MLA_FORWARD

_SHARED = ("scale", "causal", "relative", "lse_base")
"""Options that forward and backward share."""
_OPTIONAL = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")
_run_backward = backward_of(SPARSE_MLA_BACKWARD)


def _save(ctx: Any, given: Mapping[str, Any], output: Made) -> None:
    out, lse, _ = output
    ctx.save_for_backward(out, lse, *(given[name] for name in ("q", "kv", "indices", *_OPTIONAL)))
    ctx.options = {name: given[name] for name in _SHARED}


def _pull_back(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, of_logits: torch.Tensor | None
) -> dict[str, Any]:
    if of_logits is not None:
        raise no_gradient("sparse_mla_forward", "max_logits")
    out, lse, q, kv, indices, *optional = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    arrays = {"q": q, "kv": kv, "out": out, "lse": lse, "indices": indices, "dlse": dlse}
    arrays["dout"] = dout.to(q.dtype).contiguous()  # autograd may hand over an expanded scalar
    arrays |= zip(_OPTIONAL, optional, strict=True)
    exactly = torch.are_deterministic_algorithms_enabled()
    dq, dkv, d_sink = _run_backward({**arrays, **ctx.options, "deterministic": exactly})
    return {"q": dq, "kv": dkv, "attn_sink": None if arrays["attn_sink"] is None else d_sink}


transformed = register(SPARSE_MLA_FORWARD, _save, _pull_back, constants=(2,))
