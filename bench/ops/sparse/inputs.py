"""The arrays of one sparse case, and the two ways to choose indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import mla_cupy

from .costs import D_V
from .device import Device
from .sparse_cases import SparseCase

Indices = npt.NDArray[np.int32]

# Of the clustered indices: what the top-k of an indexer tends to look like in a long text.
SINK_TOKENS = 64  # at the start, chosen by every query
RECENT_TOKENS = 512  # just before the query, likewise
BLOCK_TOKENS = 64  # tokens of a block are chosen together
NEIGHBOURS = 64  # queries in a row that prefer the same blocks
OWN_TASTE = 0.25  # how much a query deviates from its neighbours, in units of the blocks' own spread


@dataclass(frozen=True)
class SparseInputs:
    """One set of inputs of the forward; `host_indices` is `indices` in NumPy."""

    q: Any  # (s_q, h_q, d_qk)
    kv: Any  # (s_kv, d_qk)
    indices: Any  # (s_q, topk) int32
    host_indices: Indices


@dataclass(frozen=True)
class GradientInputs(SparseInputs):
    """One set of inputs of the backward."""

    out: Any  # (s_q, h_q, 512)
    dout: Any  # (s_q, h_q, 512)
    lse: Any  # (s_q, h_q) float32


@dataclass(frozen=True)
class SparseOutputs:
    """What a forward wrote; lse and max_logits in natural units."""

    out: Any
    lse: Any
    max_logits: Any


@dataclass(frozen=True)
class Gradients:
    """What a backward wrote."""

    dq: Any
    dkv: Any


def forward_inputs(case: SparseCase, dtype: str, seed: int, device: Device) -> SparseInputs:
    """Random queries and latents with the case's indices."""
    indices = choose_indices(case, seed)
    return SparseInputs(
        q=device.normal((case.s_q, case.h_q, case.d_qk), dtype, 3 * seed + 1),
        kv=device.normal((case.s_kv, case.d_qk), dtype, 3 * seed + 2),
        indices=device.upload(indices),
        host_indices=indices,
    )


def backward_inputs(case: SparseCase, dtype: str, seed: int, device: Device) -> GradientInputs:
    """The same with a random gradient; `out` and `lse` are those of the project's forward."""
    forward = forward_inputs(case, dtype, seed, device)
    dout = device.normal((case.s_q, case.h_q, D_V), dtype, 3 * seed + 3)
    out, lse, _ = mla_cupy.sparse_mla_forward(forward.q, forward.kv, forward.indices, scale=case.scale)
    return GradientInputs(**vars(forward), out=out, dout=dout, lse=lse)


def choose_indices(case: SparseCase, seed: int) -> Indices:
    """Distinct causal rows in no order, and -1 where fewer than topk are visible: query i sees i + s_kv - s_q + 1."""
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
    """Every visible row alike: the least that caches can help."""

    def __init__(self, case: SparseCase, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, query: int, visible: int, count: int) -> npt.NDArray[np.int64]:
        return self._rng.choice(visible, count, replace=False)


class _Clusters:
    """The highest of random scores that neighbouring queries and the tokens of a block share; sinks and recent always.

    The score of a token is that of its block for these neighbours plus a smaller one of this query and token.
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
