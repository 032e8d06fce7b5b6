"""Losses of the lightning indexer as differentiable scalars: their gradients are made in the forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain
from mla_cupy.ops.indexer.loss_inputs import holds_codes
from mla_cupy.torch.call import call, check_kind, detached
from mla_cupy.torch.derivatives import is_recorded, no_gradient, refuse_tangents, transformed
from mla_cupy.torch.gradients.register import without_gradient
from mla_cupy.torch.library import LIBRARY, NAMESPACE, Operators, define

_SCORED = ("index_q", "index_k", "weights")
_NAME = "with_gradients"
_TENSORS = ("index_q", "index_k", "weights", "value", "d_index_q", "d_index_k", "d_weights")


def objective(
    operators: Operators,
    arrays: tuple[torch.Tensor | None, ...],
    options: tuple[Any, ...],
    straight_through: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a loss for sum(row_weights * kl) and kl.

    The sum is differentiable by index_q, index_k and weights, or by their straight-through tensors.

    Parameters
    ----------
    operators : Operators
        Of the loss.
    arrays, options : tuple
        The loss's inputs and options, in its order; `gradients` is decided here.
    straight_through : (tensor, tensor), optional
        What e4m3 codes stand for.

    Returns
    -------
    objective, kl : tensor
    """
    given = dict(zip(operators.inputs, arrays, strict=True))
    leaves = _leaves(_scored(operators, given), straight_through)
    refuse_tangents("an indexer's objective", dict(zip(_TENSORS, leaves, strict=False)))
    by_transform, wanted = transformed(), any(is_recorded(x) for x in leaves)
    constants = detached(given)
    found = _run(operators, constants, operators.operation.options(*options)._replace(gradients=wanted))
    kl, gradients, factors = found[0], found[3:6], constants["row_weights"]
    value: torch.Tensor = (kl if factors is None else kl * factors.reshape(-1, *[1] * (kl.ndim - 1))).sum()
    own = [
        made if _holds_codes(leaf) else made.to(leaf.dtype)
        for leaf, made in zip(leaves, gradients, strict=True)
        if made is not None
    ]
    if not own:
        return value, kl
    if by_transform:
        value, kl = _Objective.apply(*leaves, value, *own, kl)
        return value, kl
    return _with_gradients(*leaves, value, *own), kl


def _scored(operators: Operators, arrays: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arrays that may have gradients."""
    index_q, index_k, weights = (check_kind(operators.kinds[name], name, arrays[name]) for name in _SCORED)
    return index_q, index_k, weights


def _run(operators: Operators, inputs: Mapping[str, Any], options: Any) -> tuple[Any, ...]:
    return call(operators, (*inputs.values(), *[None] * len(operators.outputs)), tuple(options))


def _holds_codes(x: torch.Tensor) -> bool:
    return holds_codes(str(x.dtype).removeprefix("torch."))


def _leaves(
    scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor], straight_through: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors that take the gradients by index_q, index_k and weights.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
    """
    if straight_through is None:
        for name, x in zip(_TENSORS, scored[:2], strict=False):
            if _holds_codes(x) and is_recorded(x):
                remedy = "detach it, and pass its dequantised value as straight_through"
                raise DTypeError(explain(name, "codes that require grad", "a constant", remedy))
        return scored
    if not isinstance(straight_through, (tuple, list)) or len(straight_through) != 2:
        raise ArgumentError(explain("straight_through", repr(straight_through), "two tensors, of index_q and index_k"))
    for name, x, like in zip(_TENSORS, straight_through, scored, strict=False):
        argument = f"straight_through, of {name},"
        check_kind("Tensor", argument, x)
        if x.shape != like.shape:
            raise ShapeError(explain(argument, tuple(x.shape), f"{tuple(like.shape)}, like {name}"))
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise DTypeError(explain(argument, x.dtype, "bfloat16 or float32"))
    return (*straight_through, scored[2])


# ---- The operator of a scalar with precomputed gradients, which the backward multiplies by the cotangent --------


def _value(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[_TENSORS.index("value")].clone()


def _fake(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[_TENSORS.index("value")])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], *inputs[-3:])


def _pull_back(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    made = _scaled(*ctx.saved_tensors, cotangent)
    return (*made, *[None] * (len(_TENSORS) - len(made)))


def _scale(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply gradients by the cotangent. The leaves are arguments so that autograd sees the dependence."""
    *_, cotangent = tensors
    return tuple(gradient * cotangent.to(gradient.dtype) for gradient in tensors[3:-1])


_scaled = without_gradient("the backward of an indexer's objective", _scale)


_with_gradients = define(_NAME, f"({', '.join(f'Tensor {name}' for name in _TENSORS)}) -> Tensor", _value, _fake)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _pull_back, setup_context=_save, lib=LIBRARY)


class _Objective(torch.autograd.Function):  # type: ignore[misc]
    """Form of the operator for transforms of torch.func, which also differentiate kl if they are asked to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _value(*tensors), tensors[-1].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        _save(ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor | None, of_kl: torch.Tensor | None) -> tuple[Any, ...]:
        if of_kl is not None:
            raise no_gradient("an indexer's objective", "kl")
        if cotangent is None:
            return (None,) * (len(_TENSORS) + 1)
        return *_pull_back(ctx, cotangent), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_gradient("an indexer's objective", "an input")
