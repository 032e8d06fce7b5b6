"""A batch of sequences divided among ranks by tokens, and the expected results of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mla_cupy import reference

Array = np.ndarray[Any, Any]
PAGE = 16


@dataclass(frozen=True)
class Batch:
    """Sequences of random tokens, of the given lengths."""

    seqlens: tuple[int, ...]
    s_q: int = 1
    h_q: int = 8
    d_qk: int = 576
    dtype: str = "bfloat16"
    seed: int = 0

    def tokens(self) -> tuple[Array, list[Array]]:
        """The queries, and the keys of each sequence."""
        rng = np.random.default_rng(self.seed)
        kind = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float16
        q = rng.standard_normal((len(self.seqlens), self.s_q, self.h_q, self.d_qk)).astype(kind)
        return q, [rng.standard_normal((length, self.d_qk)).astype(kind) for length in self.seqlens]

    def shard(self, world: int, rank: int) -> tuple[Array, Array, Array, Array]:
        """Arguments of a decode on one rank; unused rows of the cache are NaN, and pages are in random order."""
        q, keys = self.tokens()
        table, cache = self._paged([sequence[rank::world] for sequence in keys], rank)
        return q, cache, table, np.array(self.seqlens, np.int32)

    def scattered(self, world: int, rank: int) -> tuple[Array, Array, Array, Array]:
        """As `arguments`, with each token on a random rank in random order, and this rank's lengths, which may be 0."""
        rng = np.random.default_rng(self.seed + 1)
        q, keys = self.tokens()
        owners = [rng.choice(rng.permutation(world)[: 1 + i % world], len(x)) for i, x in enumerate(keys)]
        mine = [rng.permutation(x)[owner == rank] for x, owner in zip(keys, owners, strict=True)]
        table, cache = self._paged(mine, rank)
        return q, cache, table, np.array([len(x) for x in mine], np.int32)

    def _paged(self, mine: list[Array], rank: int) -> tuple[Array, Array]:
        """The block table and the cache."""
        max_pages = max(1, *(-(-len(x) // PAGE) for x in mine))
        order = np.random.default_rng(rank).permutation(len(mine) * max_pages)
        table = order.reshape(len(mine), max_pages).astype(np.int32)
        cache = np.full((order.size, PAGE, self.d_qk), np.nan, mine[0].dtype)
        for request, sequence in enumerate(mine):
            for page in range(-(-len(sequence) // PAGE)):
                piece = sequence[page * PAGE : (page + 1) * PAGE]
                cache[table[request, page], : len(piece)] = piece
        return table, cache

    def expected(self, causal: bool = True, rounding: str | None = None) -> tuple[Array, Array]:
        """Result of one rank with all tokens; with `rounding`, rounded as kernels do."""
        return reference.mla_decode(*self.shard(1, 0), causal=causal, rounding=rounding)


def heads_of(x: Array, axis: int, world: int, rank: int) -> Array:
    """A rank's share of the heads."""
    return np.split(x, world, axis)[rank]
