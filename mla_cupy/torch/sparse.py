"""The gradient of the sparse forward."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.ops.bind import parameters
from mla_cupy.torch.library import LIBRARY, NAMESPACE

_NAMES = tuple(parameters("sparse_mla_forward"))
_SHARED = ("d_v", "scale", "causal", "lse_base")
"""The options that the backward takes as the forward does."""
_OPTIONAL = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")


def make_differentiable(backward: Any) -> None:
    """Give the forward a gradient: the operator `backward`."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        given = dict(zip(_NAMES, inputs, strict=True))
        out, lse, max_logits = output
        ctx.mark_non_differentiable(lse, max_logits)
        arrays = (given[name] for name in ("q", "kv", "indices", *_OPTIONAL))
        ctx.save_for_backward(out, lse, *arrays)
        ctx.options = {name: given[name] for name in _SHARED}

    def pull_back(ctx: Any, dout: torch.Tensor, *others: Any) -> tuple[Any, ...]:
        out, lse, q, kv, indices, *optional = ctx.saved_tensors
        named = dict(zip(_OPTIONAL, optional, strict=True))
        dout = dout.to(q.dtype).contiguous()  # autograd may hand over an expanded scalar
        exactly = torch.are_deterministic_algorithms_enabled()
        dq, dkv, d_sink = backward(q, kv, out, dout, lse, indices, **named, **ctx.options, deterministic=exactly)
        found = {"q": dq, "kv": dkv, "attn_sink": None if named["attn_sink"] is None else d_sink}
        return tuple(found.get(name) for name in _NAMES)

    torch.library.register_autograd(f"{NAMESPACE}::sparse_mla_forward", pull_back, setup_context=save, lib=LIBRARY)
