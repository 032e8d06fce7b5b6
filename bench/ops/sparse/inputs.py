"""The arrays of a sparse case, and the two ways to select rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.device import Device
from .cases import SparseCase

Indices = npt.NDArray[np.int32]

# The clustered indices resemble the top-k of an indexer in a long text.
SINK_TOKENS = 64  # at the start, selected by every query
RECENT_TOKENS = 512  # just before the query, likewise
BLOCK_TOKENS = 64  # tokens of a block are selected together
NEIGHBOURS = 64  # consecutive queries that prefer the same blocks
OWN_TASTE = 0.25  # how much a query deviates from its neighbours, relative to the spread between blocks


@dataclass(frozen=True)
class SparseInputs:
    """One set of inputs of the forward; `host_indices` is `indices` in NumPy."""

    q: Any  # (s_q, h_q, d_qk)
    kv: Any  # (s_kv, d_qk)
    indices: Any  # (s_q, topk) int32
    host_indices: Indices


@dataclass(frozen=True)
class SparseOutputs:
    """Results of a forward; lse and max_logits in natural units."""

    out: Any
    lse: Any
    max_logits: Any


def make_inputs(case: SparseCase, dtype: str, seed: int, device: Device) -> SparseInputs:
    """Random queries and latents with the case's indices."""
    indices = choose_indices(case, seed)
    return SparseInputs(
        q=device.normal((case.s_q, case.h_q, case.d_qk), dtype, 3 * seed + 1),
        kv=device.normal((case.s_kv, case.d_qk), dtype, 3 * seed + 2),
        indices=device.upload(indices),
        host_indices=indices,
    )


def choose_indices(case: SparseCase, seed: int) -> Indices:
    """Distinct causal rows, unordered, and -1 where fewer than topk are visible: query i sees i + s_kv - s_q + 1."""
    rng = np.random.default_rng(seed)
    choose = _Clusters(case, rng) if case.indices == "clustered" else _Uniform(case, rng)
    indices = np.full((case.s_q, case.topk), -1, np.int32)
    for i, slots in enumerate(indices):
        visible = i + case.s_kv - case.s_q + 1
        count = min(case.topk, max(0, visible))
        if count:
            slots[:count] = choose(i, visible, count)
    return indices


class _Uniform:
    """Uniformly from the visible rows: caches help as little as possible."""

    def __init__(self, case: SparseCase, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, query: int, visible: int, count: int) -> npt.NDArray[np.int64]:
        return self._rng.choice(visible, count, replace=False)


class _Clusters:
    """The top-k of random scores shared by neighbouring queries and by the tokens of a block; sinks and recent always.

    The score of a token is its block's score for these neighbours plus a smaller one of this query and token.
    """

    def __init__(self, case: SparseCase, rng: np.random.Generator) -> None:
        self._rng = rng
        groups, blocks = -(-case.s_q // NEIGHBOURS), -(-case.s_kv // BLOCK_TOKENS)
        self._blocks = rng.random((groups, blocks), np.float32)

    def __call__(self, query: int, visible: int, count: int) -> npt.NDArray[np.int64]:
        scores = np.repeat(self._blocks[query // NEIGHBOURS], BLOCK_TOKENS)[:visible]
        scores += OWN_TASTE * self._rng.random(visible, np.float32)
        scores[:SINK_TOKENS] = scores[-RECENT_TOKENS:] = np.inf
        chosen = np.argpartition(scores, visible - count)[visible - count :]
        return self._rng.permutation(chosen)
