"""Derivatives that do not exist: raise an error instead of returning zeros, and name the functions with a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from mla_cupy.arrays import runs_as_it_is
from mla_cupy.cache_formats import BYTE_DTYPES
from mla_cupy.dtypes import name_of
from mla_cupy.errors import DTypeError, explain

_NOT_BESIDE = {"mla_prefill": "mask"}
"""The input with which a differentiable operation has no gradient."""
_INSTEAD = (
    "detach it; in mla_cupy.torch mla_prefill, sparse_mla_forward, indexer_warmup_objective and "
    "indexer_sparse_objective have gradients, in reverse mode"
)
_FUNCTORCH = torch._C._functorch
_is_compiling = torch.compiler.is_compiling
_has_transforms = torch._C._are_functorch_transforms_active


@runs_as_it_is
def transformed() -> bool:
    """Tell whether a transform of torch.func is at work."""
    _look_outside()
    return not _is_compiling() and _has_transforms()


@runs_as_it_is
def refuse(operation: str, given: Mapping[str, Any]) -> None:
    """Raise DTypeError if a tensor's derivatives are requested, in either mode: the operation has none."""
    _look_outside()
    for argument, x in _floats(given):
        if is_recorded(x) or _has_tangent(x):
            raise no_gradient(operation, argument)


@runs_as_it_is
def refuse_tangents(operation: str, given: Mapping[str, Any]) -> None:
    """Raise DTypeError where a tensor has a tangent: the operation has a gradient in reverse mode alone."""
    _look_outside()
    for argument, x in _floats(given):
        if _has_tangent(x):
            raise no_gradient(operation, argument)


def refuse_beside(operation: str, given: Mapping[str, Any]) -> None:
    """Raise DTypeError if derivatives are requested with an input that the gradient does not support, or with codes."""
    other = _NOT_BESIDE.get(operation)
    if other is not None and given.get(other) is not None:
        refuse(f"{operation} with a {other}", given)
    q = given.get("q")
    if other is not None and isinstance(q, torch.Tensor) and name_of(q.dtype) in BYTE_DTYPES:
        refuse(f"{operation} of e4m3 codes", given)


def refuse_transforms(operation: str, given: Mapping[str, Any]) -> None:
    """`refuse` under transforms of torch.func; tensors recorded by autograd count as constants."""
    (refuse if transformed() else refuse_tangents)(operation, given)


@runs_as_it_is
def refuse_batches(operation: str, given: Mapping[str, Any]) -> None:
    """Raise DTypeError for tensors under vmap: PyTorch cannot batch an operator that writes to its arguments."""
    if _is_compiling() or not _has_transforms():
        return
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and any(map(_FUNCTORCH.is_batchedtensor, _layers(x))):
            remedy = "call it without tensors for results, or loop over the batch"
            expected = f"one without a batch: {operation} writes to its arguments here"
            raise DTypeError(explain(name, "a tensor under vmap", expected, remedy))


@runs_as_it_is
def is_recorded(x: torch.Tensor) -> bool:
    """True if reverse mode records a tensor, beneath vmap, too."""
    _look_outside()
    return torch.is_grad_enabled() and any(layer.requires_grad for layer in _layers(x))


def no_gradient(operation: str, argument: str) -> DTypeError:
    """The error for a derivative that does not exist."""
    return DTypeError(explain(argument, "a derivative", f"a constant: {operation} has no such gradient", _INSTEAD))


def _has_tangent(x: torch.Tensor) -> bool:
    """Tell whether forward mode follows a tensor."""
    if _is_compiling() or forward_ad._current_level < 0:
        return False
    unbatched = (layer for layer in _layers(x) if not _FUNCTORCH.is_batchedtensor(layer))
    return any(forward_ad.unpack_dual(layer).tangent is not None for layer in unbatched)


def _floats(given: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors that can have derivatives."""
    return ((name, x) for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point())


def _layers(x: torch.Tensor) -> Iterable[torch.Tensor]:
    """A tensor, and the tensors that transforms have wrapped in it, from outside in."""
    yield x
    while not _is_compiling() and _FUNCTORCH.is_functorch_wrapped_tensor(x):
        x = _FUNCTORCH.get_unwrapped(x)
        yield x


def _look_outside() -> None:
    """Make a compiler that meets derivatives break its graph: only code outside can see whose derivatives they are."""
    if _is_compiling() and _differentiating():
        _leave_the_graph()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _differentiating() -> bool:
    """Tell whether torch.func differentiates, or forward mode does. Compiled programs are guarded by both."""
    stack = _FUNCTORCH.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(one.key() != _FUNCTORCH.TransformType.Vmap for one in stack)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave_the_graph() -> None:
    """Do nothing, outside of a graph."""
