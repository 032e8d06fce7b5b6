"""Losses of the indexers of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import mla_cupy.torch as mla
from mla_cupy.transformers.indexer import IndexStates


@dataclass
class Learning:
    """Collects the loss of each layer's indexer.

    Attributes
    ----------
    tokens : int, optional
        Divisor of the losses. Default: the tokens of the batch.
    covers : bool
        Also measure the share of the attention that the indexers select.
    is_open : bool
        False after the forward pass: gradient checkpointing computes layers again, and these losses are dropped.
    losses, kl, coverage : list of tensor
        By layer: the differentiable loss, the mean divergence, the covered share.
    """

    tokens: int | None = None
    covers: bool = False
    is_open: bool = True
    losses: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    coverage: list[torch.Tensor] = field(default_factory=list)

    def from_all_keys(
        self, q: tuple[torch.Tensor, torch.Tensor], k: tuple[torch.Tensor, torch.Tensor], states: IndexStates, **of: Any
    ) -> None:
        """Compare with attention to all keys: queries and keys per head, without RoPE and with it."""
        of |= {"q_rope": q[1], "k_rope": k[1], "row_weights": self.shares(len(k[1]), len(k[1]), k[1].device)}
        self.add(*mla.indexer_warmup_objective(q[0], k[0], states.q, states.k, states.weights, **of))

    def from_selected_keys(
        self, q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, states: IndexStates, **of: Any
    ) -> None:
        """Compare with attention of absorbed queries to the selected latents; a rank's queries are some of the rows."""
        shares = self.shares(len(q), len(rows), q.device)
        self.add(*mla.indexer_sparse_objective(q, rows, *states, indices, row_weights=shares, **of))

    def cover(
        self, q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, choose: torch.Tensor, **of: Any
    ) -> None:
        """Measure the share of the attention of absorbed queries that the indices hold, over queries that `choose`."""
        shares = mla.indexer_head_sums(q, rows, indices=indices, **of).sum(1) / q.shape[1]
        self.coverage.append((shares * choose).sum() / choose.sum())

    def shares(self, n: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Factors of the losses of n of the batch's tokens."""
        return torch.full((n,), 1 / (self.tokens or tokens), device=device)

    def add(self, loss: torch.Tensor, kl: torch.Tensor) -> None:
        """Keep the results of a layer."""
        if self.is_open:
            self.losses.append(loss)
            self.kl.append(kl.detach().mean())
