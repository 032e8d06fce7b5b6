"""The gradient of dense attention with keys and values per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import name_of
from mla_cupy.torch.derivatives import no_gradient
from mla_cupy.torch.gradients.register import Made, backward_of, register
from mla_cupy.torch.operators import MLA_PREFILL, MLA_PREFILL_BACKWARD

_SHARED = ("causal", "scale")
"""Options that forward and backward share."""
_ARRAYS = ("q", "k", "v", "q_rope", "k_rope", "cu_seqlens_q", "cu_seqlens_kv")
_run_backward = backward_of(MLA_PREFILL_BACKWARD)


def _save(ctx: Any, given: Mapping[str, Any], output: Made) -> None:
    ctx.save_for_backward(*output, given["state_out"], given["state_lse"], *(given[name] for name in _ARRAYS))
    ctx.options = {name: given[name] for name in _SHARED}
    ctx.masked = given["mask"] is not None
    ctx.coded = name_of(given["q"].dtype) in BYTE_DTYPES


def _pull_back(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> dict[str, Any]:
    if ctx.masked:
        raise no_gradient("mla_prefill with a mask", "out")
    if ctx.coded:
        raise no_gradient("mla_prefill of e4m3 codes", "out")
    out, lse, state_out, state_lse, *arrays = ctx.saved_tensors
    given = dict(zip(_ARRAYS, arrays, strict=True))
    dout = torch.zeros_like(out) if dout is None else dout
    found = {} if state_out is None else _of_state(state_out, state_lse, out, lse, dout, dlse)
    dout = dout.to(given["q"].dtype).contiguous()  # autograd may hand over an expanded scalar
    exactly = torch.are_deterministic_algorithms_enabled()
    results = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    made = _run_backward({**given, **results, **ctx.options, "deterministic": exactly})
    names = ("q", "k", "v", "q_rope", "k_rope")
    return found | {name: x for name, x in zip(names, made, strict=True) if given[name] is not None}


def _of_state(
    state_out: torch.Tensor,
    state_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Gradients of the state that was merged into the result with the weight exp(its lse - lse).

    Of a weight of 1 the result's values are the state's, but rounded: their difference would be noise.
    """
    empty = state_lse.isinf()
    weight = torch.where(empty, 0, torch.exp(torch.where(empty, 0, state_lse) - torch.where(empty, 0, lse)))
    values = torch.where(empty[..., None], 0, state_out).float()
    d_lse = torch.where(state_lse == lse, 0, (dout.float() * (values - out.float())).sum(dim=-1))
    d_lse = weight * (d_lse if dlse is None else d_lse + dlse)
    return {"state_out": (weight[..., None] * dout.float()).to(state_out.dtype), "state_lse": d_lse}


transformed = register(MLA_PREFILL, _save, _pull_back)
