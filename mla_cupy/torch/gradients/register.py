"""Gradients of operators: by registration for autograd and compilers, by a function for torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mla_cupy.ops.bind import parameters
from mla_cupy.ops.value_checks import checking, is_asked
from mla_cupy.torch.derivatives import no_gradient
from mla_cupy.torch.library import LIBRARY, NAMESPACE, Operators

Made = tuple[torch.Tensor, ...]
Save = Callable[[Any, Mapping[str, Any], Made], None]
PullBack = Callable[..., Mapping[str, Any]]


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    return {key: value.default for key, value in parameters(name).items()}


def _ordered(operators: Operators, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arrange the arguments of an operator in its order, with defaults."""
    return tuple({**_defaults(operators.operation.name), **given}.values())


def register(
    operators: Operators, save: Save, pull_back: PullBack, constants: Sequence[int] = ()
) -> Callable[..., Made]:
    """Give an operator a gradient.

    Parameters
    ----------
    operators : Operators
    save : callable
        `save(ctx, given, results)` keeps what the backward needs; `given` are the parameters by name.
    pull_back : callable
        `pull_back(ctx, *cotangents)`: the gradients by the parameters' names. A cotangent is None where nothing
        depends on the result.
    constants : sequence of int
        The results that have no gradient: a compiler makes zeros for a cotangent that there is not, and must know
        of them beforehand.

    Returns
    -------
    callable
        The operation under transforms of torch.func, which do not use the operator's own gradient.
    """
    name, names = operators.operation.name, tuple(operators.kinds)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.checks = is_asked()
        save(ctx, dict(zip(names, inputs, strict=True)), output)

    def setup_and_mark(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)
        ctx.mark_non_differentiable(*(output[index] for index in constants))

    def in_order(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        with checking(ctx.checks):  # autograd has threads of its own
            found = pull_back(ctx, *cotangents)
        return tuple(found.get(parameter) for parameter in names)

    class Forward(torch.autograd.Function):  # type: ignore[misc]
        generate_vmap_rule = True

        @staticmethod
        def forward(*given: Any) -> Any:
            return operators.make(*given)

        setup_context = staticmethod(setup)
        backward = staticmethod(in_order)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise no_gradient(name, "an input")

    torch.library.register_autograd(f"{NAMESPACE}::{name}", in_order, setup_context=setup_and_mark, lib=LIBRARY)

    def transformed(**given: Any) -> Made:
        found: Made = Forward.apply(*_ordered(operators, given))
        return found

    return transformed


def without_gradient(name: str, function: Callable[..., Made]) -> Callable[..., Made]:
    """A function that runs in a backward. It has no gradient itself, which its name shows."""

    class Backward(torch.autograd.Function):  # type: ignore[misc]
        generate_vmap_rule = True

        @staticmethod
        def forward(*given: Any) -> Any:
            return function(*given)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise no_gradient(name, "its results")

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise no_gradient(name, "its results")

    def run(*given: Any) -> Made:
        # It is recorded, whether or not somebody differentiates it again.
        found: Made = (Backward.apply if torch.is_grad_enabled() else function)(*given)
        return found

    return run


def backward_of(operators: Operators) -> Callable[[Mapping[str, Any]], Made]:
    """An operation that runs in a backward, by its parameters' names."""
    run = without_gradient(operators.operation.name, operators.make)
    return lambda given: run(*_ordered(operators, given))
