"""Docstrings of the functions for PyTorch, attached when they are defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from mla_cupy import ops
from mla_cupy.ops import docstrings
from mla_cupy.ops.checks import explains_scale
from mla_cupy.ops.docstrings import (
    NO_GRADIENT_OF_DECODE,
    NO_GRADIENT_OF_HEAD_SUMS,
    OBJECTIVES,
    Docstring,
    Text,
    Words,
)

_WORDS = Words("tensor", {r"\bDecodePlan\b": "TorchDecodePlan"})
_F = TypeVar("_F", bound=Callable[..., Any])

_DETERMINISTIC = "The gradients are deterministic under `torch.use_deterministic_algorithms(True)`."
_TEXTS: dict[str, Text] = {
    **OBJECTIVES,
    "indexer_head_sums": Text(notes=NO_GRADIENT_OF_HEAD_SUMS),
    "indexer_sparse_loss": Text(
        notes="Derivatives do not go through it: `indexer_sparse_objective` is differentiable."
    ),
    "indexer_warmup_loss": Text(
        notes="Derivatives do not go through it: `indexer_warmup_objective` is differentiable."
    ),
    "cache_append": Text(notes="No gradient flows through the cache."),
    "mla_prepare": Text(notes=NO_GRADIENT_OF_DECODE),
    "mla_decode": Text(
        notes=NO_GRADIENT_OF_DECODE,
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, cache = torch.ones(1, 1, 16, 576).bfloat16(), torch.ones(4, 64, 576).bfloat16()
>>> table, seqlens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
>>> out, lse = mla.mla_decode(q, cache, table, seqlens, scale=192**-0.5)
>>> tuple(out.shape), float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
((1, 1, 16, 512), 1.0, 46.174)""",
    ),
    "mla_prefill": Text(
        notes="`out` and `lse` are differentiable with respect to queries, keys, values and the state, without a mask "
        f"and unless you pass tensors for them. {_DETERMINISTIC}",
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, v = torch.ones(3, 4, 192).bfloat16(), torch.ones(3, 4, 128).bfloat16().requires_grad_()
>>> out, lse = mla.mla_prefill(q, torch.ones_like(q), v)
>>> out.sum().backward()
>>> [round(float(x), 2) for x in v.grad[:, 0, 0]]  # of the queries: one, a half, a third
[1.84, 0.83, 0.33]""",
    ),
    "mla_prefill_backward": Text(
        more="Autograd calls it. Call it yourself to choose the gradients' memory, such as one tensor for dk and dv."
    ),
    "sparse_mla_backward": Text(more="Autograd calls it. Call it yourself for options that autograd cannot pass."),
    "sparse_mla_decode": Text(
        notes=NO_GRADIENT_OF_DECODE,
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
>>> mla.cache_append(torch.ones(2, 512).half(), torch.zeros(2, 64).half(), cache, torch.tensor([70, 5]))
>>> q, indices = torch.ones(1, 1, 8, 576).half(), torch.tensor([[[5, -1, 70]]], dtype=torch.int32)
>>> out, lse = mla.sparse_mla_decode(q, cache, indices, scale=192**-0.5)
>>> float(out[0, 0, 0, 0]), round(float(lse[0, 0, 0]), 3)
(1.0, 37.644)""",
    ),
    "sparse_mla_forward": Text(
        notes="`out` and `lse` are differentiable with respect to `q`, `kv` and `attn_sink`, unless tensors for them "
        f"are given; `max_logits` has no gradient. {_DETERMINISTIC}",
        examples="""\
>>> import torch
>>> import mla_cupy.torch as mla
>>> q, kv = torch.ones(2, 16, 576).bfloat16(), torch.ones(100, 576).bfloat16().requires_grad_()
>>> indices = torch.tensor([[3, 70, -1], [5, -1, -1]], dtype=torch.int32)
>>> out, lse, max_logits = mla.sparse_mla_forward(q, kv, indices, scale=192**-0.5)
>>> out.sum().backward()
>>> float(kv.grad[3, 0]), float(kv.grad[5, 0]), float(kv.grad[4, 0])
(8.0, 16.0, 0.0)""",
    ),
}


def documented(function: _F) -> _F:
    """Attach the docstring of the public function of that name, in PyTorch's words."""
    name = function.__name__
    parameters = inspect.signature(function).parameters
    if "scale" in parameters and parameters["scale"].default is inspect.Parameter.empty:
        explains_scale(function)
    loss = name.replace("_objective", "_loss")
    operation, text = ops.BOUND_OPERATIONS[loss], _TEXTS.get(name, Text())
    found = docstrings.of_function(function, operation, _WORDS, text)
    if name != loss:
        found = docstrings.of_objective(found, text, _WORDS.array)
    else:
        found = replace(found, notes=_notes(found, len(operation.outputs), "workspace" in operation.defaults))
    function.__doc__ = found.text()
    return function


def _notes(docstring: Docstring, results: int, has_workspace: bool) -> str:
    """Notes on gradients, and on passing tensors for results."""
    rules = [docstring.notes]
    if results > 1:
        rules.append("Pass tensors for all results or for none.")
    if has_workspace:
        rules.append("A `workspace` requires tensors for the results.")
    return docstrings.filled(" ".join(filter(None, rules)))
