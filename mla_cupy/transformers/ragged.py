"""Padded and packed batches: the real tokens, and where each sequence starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mla_cupy.ops.groups import Packed

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Ragged:
    """The real tokens of a batch [b, s], row after row.

    Attributes
    ----------
    b, s : int
    rows : tensor, (n,), int64, optional
        Places of real tokens in the flattened batch; None if all are real.
    counts : list of int
        Tokens of each sequence. Packed rows hold several sequences, so there may be more than b.
    device : torch.device
    """

    b: int
    s: int
    rows: torch.Tensor | None
    counts: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(mask: torch.Tensor | None, b: int, s: int, device: torch.device) -> Ragged:
        """Read a mask of `masks.lean`: None, padding or numbers of packed sequences, of the last s tokens.

        Reading a mask waits for the GPU, once for all layers.
        """
        if mask is None:
            return Ragged(b, s, None, (s,) * b, device)
        found: Ragged | None = _made.get(mask)
        if found is None or (found.b, found.s) != (b, s):
            found = _made[mask] = _read(mask[:, -s:], b, s)
        return found

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Real tokens of a tensor [b, s, ...], as [n, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `take`; padding is 0."""
        if self.rows is None:
            return x.unflatten(0, (self.b, self.s))
        out = x.new_zeros(self.b * self.s, *x.shape[1:])
        return out.index_copy(0, self.rows, x).unflatten(0, (self.b, self.s))

    @cached_property
    def starts(self) -> torch.Tensor:
        """(sequences + 1,), int32: where each sequence starts among the real tokens."""
        return starts_of(self.counts, self.device)

    @cached_property
    def sequence(self) -> torch.Tensor:
        """(n,), int32: the sequence of each real token."""
        numbers = torch.arange(len(self.counts), dtype=torch.int32, device=self.device)
        if self.rows is None and len(self.counts) == self.b:
            return numbers.repeat_interleave(self.s)
        return numbers.repeat_interleave(torch.tensor(self.counts, device=self.device))

    def packed(self, keys: torch.Tensor | None = None) -> Packed | None:
        """Make the kernels' argument; `keys` are the starts of keys where these are others."""
        if keys is None and len(self.counts) == 1:
            return None
        return Packed(self.starts, self.starts if keys is None else keys)


def starts_of(counts: tuple[int, ...] | list[int], device: torch.device) -> torch.Tensor:
    """(len + 1,), int32: 0 and the running sums."""
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device)


def _read(mask: torch.Tensor, b: int, s: int) -> Ragged:
    if mask.dtype == torch.bool:
        counts = mask.sum(1).tolist()
        rows = None if sum(counts) == b * s else mask.flatten().nonzero()[:, 0]
        return Ragged(b, s, rows, tuple(counts), mask.device)
    lengths = [torch.bincount(row).tolist() for row in (mask - mask[:, :1])]
    return Ragged(b, s, None, tuple(n for row in lengths for n in row if n), mask.device)
