"""Losses as differentiable scalars: their gradients are there already, and are multiplied by the cotangent."""

from __future__ import annotations

from typing import Any

import torch

from mla_cupy.torch.library import LIBRARY, NAMESPACE, define

_NAME = "with_gradients"
_TENSORS = ("index_q", "index_k", "weights", "value", "d_index_q", "d_index_k", "d_weights")


def objective(
    leaves: tuple[torch.Tensor, ...],
    kl: torch.Tensor,
    row_weights: torch.Tensor | None,
    gradients: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    """sum(row_weights * kl); with `gradients` it is differentiable by the leaves: index_q, index_k and weights."""
    factors = kl if row_weights is None else kl * row_weights.detach().reshape(-1, *[1] * (kl.ndim - 1))
    value: torch.Tensor = factors.sum()
    own = [made.to(leaf.dtype) for leaf, made in zip(leaves, gradients, strict=True) if made is not None]
    return _operator(*leaves, value, *own) if own else value


def _run(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[_TENSORS.index("value")].clone()


def _fake(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[_TENSORS.index("value")])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[-3:])


def _pull_back(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    made = [gradient * cotangent.to(gradient.dtype) for gradient in ctx.saved_tensors]
    return (*made, *[None] * (len(_TENSORS) - len(made)))


_operator = define(_NAME, f"({', '.join(f'Tensor {name}' for name in _TENSORS)}) -> Tensor", _run, _fake)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _pull_back, setup_context=_save, lib=LIBRARY)
