"""The losses that train the lightning indexer, also as differentiable scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from mla_cupy import ops
from mla_cupy.errors import DTypeError, ShapeError, explain
from mla_cupy.ops.checks import check_flag
from mla_cupy.ops.indexer.loss_inputs import holds_codes
from mla_cupy.torch.derivatives import is_recorded, no_gradient, refuse_tangents, refuse_transforms, transformed
from mla_cupy.torch.library import LIBRARY, NAMESPACE, define
from mla_cupy.torch.operators import run, single, targets

__all__ = ["indexer_sparse_objective", "indexer_warmup_objective"]

_NAME = "with_gradients"
_TENSORS = ("index_q", "index_k", "weights", "value", "d_index_q", "d_index_k", "d_weights")


def indexer_warmup_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    v: torch.Tensor | None = None,
    gradients: bool = True,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    attention_lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The indexer's warm-up loss and its gradients: see `mla_cupy.indexer_warmup_loss`.

    Autograd does not look into it: `indexer_warmup_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights, v : tensor
    gradients : bool
    kl, mass, index_lse, d_index_q, d_index_k, d_weights, out, attention_lse : tensor, optional
        Where the results go: all that there are, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        q_rope, k_rope, k_scale, q_scale, lse, head_sums, row_weights, cu_seqlens_q, cu_seqlens_kv, target, scale,
        target_scale, causal, buffer_bytes, kernel.

    Returns
    -------
    kl, mass, index_lse : tensor
    d_index_q, d_index_k, d_weights : tensor or None
        None without `gradients`.
    out, attention_lse : tensor or None
        None without `v`.
    """
    losses = {"kl": kl, "mass": mass, "index_lse": index_lse}
    gradients = check_flag("gradients", gradients)
    backward = {"d_index_q": d_index_q, "d_index_k": d_index_k, "d_weights": d_weights} if gradients else {}
    attention = {} if v is None else {"out": out, "attention_lse": attention_lse}
    inputs = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "v": v, **options}
    chosen = {"gradients": gradients, **_constants("indexer_warmup_loss", inputs)}
    return _run_loss("indexer_warmup_loss", chosen, {**losses, **backward, **attention}, workspace)


def indexer_warmup_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(row_weights * kl) of the indexer's warm-up loss, differentiable by index_q, index_k and weights.

    The gradients are made in the forward: its larger part, the scores of the main attention, is not repeated. The
    backward multiplies them by the cotangent, in the dtypes of the arrays.

    Parameters
    ----------
    q, k, index_q, index_k, weights : tensor
    row_weights : tensor, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    straight_through : (tensor, tensor), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.
    **options
        Of `indexer_warmup_loss`: q_rope, k_rope, k_scale, q_scale, lse, head_sums, cu_seqlens_q, cu_seqlens_kv, target,
        scale, target_scale, causal, buffer_bytes, kernel.

    Returns
    -------
    objective : tensor, (), float32
    kl : tensor
        Without a gradient.
    """
    return _objective(indexer_warmup_loss, (q, k), (index_q, index_k, weights), straight_through, row_weights, options)


def indexer_sparse_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    gradients: bool = True,
    kl: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    index_lse: torch.Tensor | None = None,
    d_index_q: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The indexer's loss over selected keys and its gradients: see `mla_cupy.indexer_sparse_loss`.

    Autograd does not look into it: `indexer_sparse_objective` is differentiable.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : tensor
    gradients : bool
    kl, mass, index_lse, d_index_q, d_index_k, d_weights : tensor, optional
        Where the results go: all that there are, or none.
    workspace : tensor, uint8, optional
        With these.
    **options
        k_scale, q_scale, lse, head_sums, topk_length, row_weights, cu_seqlens_q, cu_seqlens_kv, scale, causal,
        deterministic, buffer_bytes, kernel.

    Returns
    -------
    kl, mass, index_lse : tensor
    d_index_q, d_index_k, d_weights : tensor or None
        None without `gradients`.
    """
    losses = {"kl": kl, "mass": mass, "index_lse": index_lse}
    gradients = check_flag("gradients", gradients)
    backward = {"d_index_q": d_index_q, "d_index_k": d_index_k, "d_weights": d_weights} if gradients else {}
    inputs = {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "weights": weights, "indices": indices, **options}
    chosen = {"gradients": gradients, **_constants("indexer_sparse_loss", inputs)}
    return _run_loss("indexer_sparse_loss", chosen, {**losses, **backward}, workspace)


def indexer_sparse_objective(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    straight_through: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(row_weights * kl) of the indexer's loss over selected keys, differentiable by index_q, index_k and weights.

    The gradients are made in the forward; the backward multiplies them by the cotangent, in the dtypes of the arrays.

    Parameters
    ----------
    q, k, index_q, index_k, weights, indices : tensor
    row_weights : tensor, (s_q,), float32, optional
        For a mean, 1 / s_q. They count as constants.
    straight_through : (tensor, tensor), optional
        Of e4m3 codes: the index queries and keys that they stand for, in bfloat16 or float32, which take the gradients
        in their place. Without them, only `weights` has a gradient.
    **options
        Of `indexer_sparse_loss`: k_scale, q_scale, lse, head_sums, topk_length, cu_seqlens_q, cu_seqlens_kv, scale,
        causal, deterministic, buffer_bytes, kernel.

    Returns
    -------
    objective : tensor, (), float32
    kl : tensor
        Without a gradient.
    """
    loss = partial(indexer_sparse_loss, indices=indices)
    return _objective(loss, (q, k), (index_q, index_k, weights), straight_through, row_weights, options)


def indexer_head_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    head_sums: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """What the indexer's losses normalise to their target, of one rank's heads: see `mla_cupy.indexer_head_sums`.

    Parameters
    ----------
    q, k : tensor
    head_sums : tensor, optional
        Where the result goes.
    workspace : tensor, uint8, optional
        With `head_sums`.
    **options
        q_rope, k_rope, indices, lse, topk_length, cu_seqlens_q, cu_seqlens_kv, scale, causal, buffer_bytes, kernel.

    Returns
    -------
    tensor

    Notes
    -----
    It has no gradient: nothing flows to the main attention.
    """
    given = targets(head_sums=head_sums)
    inputs = _constants("indexer_head_sums", {"q": q, "k": k, **options})
    return single(run("indexer_head_sums", (), inputs, given, workspace))


# ---- What both losses do ----------------------------------------------------------------------------------------


def _constants(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, detached: its results are constants to autograd.

    Raises
    ------
    DTypeError
        Under a transform of torch.func that wants derivatives: there zeros would count as such.
    """
    refuse_transforms(name, given)
    return _detached(given)


def _detached(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def _run_loss(
    name: str,
    options: dict[str, Any],
    wanted: dict[str, torch.Tensor | None],
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """All results of a loss, None where they are not `wanted`: the names of those that are, and where they go."""
    given = targets(**wanted)
    names = [output.name for output in ops.BOUND_OPERATIONS[name].outputs]
    found = dict(zip(given or names, run(name, (), options, given, workspace), strict=True))
    return tuple(found[name] if name in wanted else None for name in names)


def _objective(
    loss: Callable[..., tuple[torch.Tensor | None, ...]],
    attention: tuple[torch.Tensor, torch.Tensor],
    scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    straight_through: tuple[torch.Tensor, torch.Tensor] | None,
    row_weights: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum(row_weights * kl), differentiable by index_q, index_k and weights, or what takes their gradients; and kl."""
    leaves = _leaves(scored, straight_through)
    refuse_tangents("an indexer's objective", dict(zip(_TENSORS, leaves, strict=False)))
    by_transform, wanted = transformed(), any(is_recorded(x) for x in leaves)
    constants = _detached({"row_weights": row_weights, **options})
    found = loss(*(x.detach() for x in (*attention, *scored)), gradients=wanted, **constants)
    kl, gradients, factors = found[0], found[3:6], constants["row_weights"]
    assert kl is not None
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


def _holds_codes(x: torch.Tensor) -> bool:
    return holds_codes(str(x.dtype).removeprefix("torch."))


def _leaves(
    scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor], straight_through: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What takes the gradients by index_q, index_k and weights.

    Raises
    ------
    ShapeError, DTypeError
    """
    if straight_through is None:
        for name, x in zip(_TENSORS, scored[:2], strict=False):
            if _holds_codes(x) and is_recorded(x):
                remedy = "detach it, and give what it stands for as straight_through"
                raise DTypeError(explain(name, "codes that require grad", "a constant", remedy))
        return scored
    for name, x, like in zip(_TENSORS, straight_through, scored, strict=False):
        argument = f"straight_through, of {name},"
        if x.shape != like.shape:
            raise ShapeError(explain(argument, tuple(x.shape), f"{tuple(like.shape)}, like {name}"))
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise DTypeError(explain(argument, x.dtype, "bfloat16 or float32"))
    return (*straight_through, scored[2])


# ---- The operator of a scalar whose gradients are there already, and are multiplied by the cotangent ------------


def _value(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[_TENSORS.index("value")].clone()


def _fake(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensors[_TENSORS.index("value")])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[-3:])


def _pull_back(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    made = [gradient * cotangent.to(gradient.dtype) for gradient in ctx.saved_tensors]
    return (*made, *[None] * (len(_TENSORS) - len(made)))


_with_gradients = define(_NAME, f"({', '.join(f'Tensor {name}' for name in _TENSORS)}) -> Tensor", _value, _fake)
torch.library.register_autograd(f"{NAMESPACE}::{_NAME}", _pull_back, setup_context=_save, lib=LIBRARY)


class _Objective(torch.autograd.Function):  # type: ignore[misc]
    """The same for transforms of torch.func, which also differentiate kl if they are asked to."""

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
