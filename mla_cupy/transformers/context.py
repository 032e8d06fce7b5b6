"""Context parallelism of a patched model: a rank has two pieces of every row of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.parallel.zigzag import Zigzag
from mla_cupy.torch.parallel import gather, prefill, select, warmup_objective
from mla_cupy.torch.parallel.attention import Expand, Tensors
from mla_cupy.transformers.families import Sizes
from mla_cupy.transformers.indexer import IndexStates
from mla_cupy.transformers.learning import Learning

_IGNORED = -100
"""The label that transformers' losses leave out."""
Pair = tuple[torch.Tensor, torch.Tensor]


class Context(NamedTuple):
    """The ranks that share out the tokens of each row.

    Attributes
    ----------
    group : ProcessGroup
    zigzag : Zigzag
        The rows of a call.
    """

    group: Any
    zigzag: Zigzag

    @staticmethod
    def of(group: Any, b: int, s: int) -> Context | None:
        """Context of b rows with s tokens on every rank; None without a group."""
        if group is None:
            return None
        world = dist.get_world_size(group)
        return Context(group, Zigzag((s * world,) * b, world))

    def prefill(self, projection: nn.Module, sizes: Sizes, q: Pair, keys: Pair, scale: float) -> Pair:
        """Output and log-sum-exps: of queries without and with RoPE; keys are latents and RoPE columns."""
        expand, parameters = _expansion(projection, sizes)
        of = {"parameters": parameters, "group": self.group, "scale": scale}
        found: Pair = prefill(q[0], keys[0], expand, self.zigzag, q_rope=q[1], k_rope=keys[1], **of)
        return found

    def warm_up(
        self,
        learning: Learning,
        projection: nn.Module,
        sizes: Sizes,
        q: Pair,
        keys: Pair,
        states: IndexStates,
        **of: Any,
    ) -> None:
        """Compare the indexer with attention to all keys."""
        with torch.no_grad():
            latents, k_rope = map(self.gather, keys)
            k, _ = _expansion(projection, sizes)[0](latents)
        given = (q[0].detach(), k, states.q, self.gather(states.k), states.weights, self.zigzag)
        shares = learning.shares(len(q[0]), self.zigzag.tokens, k.device)
        of |= {"q_rope": q[1].detach(), "k_rope": k_rope, "row_weights": shares, "group": self.group}
        learning.add(*warmup_objective(*given, **of))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks."""
        return gather(x, self.zigzag, group=self.group)

    def select(self, states: IndexStates, topk: int) -> torch.Tensor:
        """Rows of all ranks' tokens that each query selects, by index keys of all ranks."""
        return select(*states, self.zigzag, topk=topk, group=self.group)


def _expansion(projection: nn.Module, sizes: Sizes) -> tuple[Expand, Tensors]:
    """kv_b_proj as a function of latents and of its parameters that have gradients, and these."""
    named = {name: x for name, x in projection.named_parameters() if x.requires_grad}

    def expand(latents: torch.Tensor, *parameters: torch.Tensor) -> Pair:
        replaced = dict(zip(named, parameters, strict=True)) if parameters else {}
        kv = functional_call(projection, replaced, (latents,))
        k, v = kv.view(len(latents), -1, sizes.nope + sizes.v).split([sizes.nope, sizes.v], -1)
        return k, v

    return expand, tuple(named.values())


def context_parallel_inputs(
    input_ids: torch.Tensor, labels: torch.Tensor | None = None, *, group: Any = None
) -> dict[str, torch.Tensor]:
    """This rank's part of a batch, for a model after `patch(model, context_parallel=group)`.

    Parameters
    ----------
    input_ids : tensor, (b, n)
        Whole rows, the same on every rank; n is a multiple of 2 * world. Pad at the end, with labels of -100: causal
        attention needs no mask then.
    labels : tensor, (b, n), optional
        What transformers' losses read, -100 for none.
    group : ProcessGroup, optional
        Default: the default group.

    Returns
    -------
    dict
        `input_ids`, `position_ids`; with labels also `labels`, `shift_labels` (the next token of each, across the
        pieces) and `num_items_in_batch` (of all ranks, so that the ranks' losses add up to the mean over all tokens).

    Raises
    ------
    ArgumentError
        If the rows cannot be cut.

    Examples
    --------
    >>> part = context_parallel_inputs(input_ids, labels=input_ids)  # doctest: +SKIP
    >>> model(**part, use_cache=False).loss.backward()  # doctest: +SKIP
    """
    world, rank, n = dist.get_world_size(group), dist.get_rank(group), input_ids.shape[1]
    if n % (2 * world):
        remedy = "pad the rows at the end, with labels of -100"
        raise ArgumentError(explain("input_ids.shape[1]", n, f"a multiple of 2 * world = {2 * world}", remedy))
    places = torch.from_numpy(Zigzag((n,), world).rows(rank)).to(input_ids.device)
    found = {"input_ids": input_ids[:, places], "position_ids": places.expand(len(input_ids), -1)}
    if labels is not None:
        following = nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        found |= {"labels": labels[:, places], "shift_labels": following[:, places]}
        found["num_items_in_batch"] = (following != _IGNORED).sum()
    return found
