"""The gradient of the sparse forward: of the operator for autograd and compilers, of a function for torch.func."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy.ops.bind import parameters
from mla_cupy.torch.derivatives import no_gradient
from mla_cupy.torch.library import LIBRARY, NAMESPACE
from mla_cupy.torch.operators import OPERATORS

_FORWARD, _BACKWARD = "sparse_mla_forward", "sparse_mla_backward"
_TAKEN = {name: {key: value.default for key, value in parameters(name).items()} for name in (_FORWARD, _BACKWARD)}
"""The parameters of both, in order, with their defaults."""
_SHARED = ("d_v", "scale", "causal", "lse_base")
"""The options that the backward takes as the forward does."""
_OPTIONAL = ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")


def transformed_forward(**given: Any) -> tuple[torch.Tensor, ...]:
    """The forward under transforms of torch.func, which do not use the operator's own gradient."""
    found: tuple[torch.Tensor, ...] = _Forward.apply(*_ordered(_FORWARD, given))
    return found


def _ordered(name: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple({**_TAKEN[name], **given}.values())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    given = dict(zip(_TAKEN[_FORWARD], inputs, strict=True))
    out, lse, _ = output
    ctx.save_for_backward(out, lse, *(given[name] for name in ("q", "kv", "indices", *_OPTIONAL)))
    ctx.options = {name: given[name] for name in _SHARED}


def _save_and_mark(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """A compiler makes zeros for a cotangent that there is not: of what has no gradient it must know beforehand."""
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(output[2])


def _pull_back(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, of_logits: torch.Tensor | None
) -> tuple[Any, ...]:
    if of_logits is not None:
        raise no_gradient(_FORWARD, "max_logits")
    out, lse, q, kv, indices, *optional = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    arrays = {"q": q, "kv": kv, "out": out, "lse": lse, "indices": indices, "dlse": dlse}
    arrays["dout"] = dout.to(q.dtype).contiguous()  # autograd may hand over an expanded scalar
    arrays |= zip(_OPTIONAL, optional, strict=True)
    exactly = torch.are_deterministic_algorithms_enabled()
    dq, dkv, d_sink = _run_backward({**arrays, **ctx.options, "deterministic": exactly})
    found = {"q": dq, "kv": dkv, "attn_sink": None if arrays["attn_sink"] is None else d_sink}
    return tuple(found.get(name) for name in _TAKEN[_FORWARD])


def _run_backward(given: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled():  # it is recorded, whether or not somebody differentiates it again
        found: tuple[torch.Tensor, ...] = _Backward.apply(*_ordered(_BACKWARD, given))
    else:
        found = OPERATORS[_BACKWARD][0](**given)
    return found


class _Forward(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> Any:
        return OPERATORS[_FORWARD][0](*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _pull_back(ctx, *cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_gradient(_FORWARD, "an input")


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    """The backward, which has no gradient itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Any) -> Any:
        return OPERATORS[_BACKWARD][0](*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise no_gradient(_BACKWARD, "its results")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_gradient(_BACKWARD, "its results")


torch.library.register_autograd(f"{NAMESPACE}::{_FORWARD}", _pull_back, setup_context=_save_and_mark, lib=LIBRARY)
