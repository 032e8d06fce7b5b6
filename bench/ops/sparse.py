"""Cases, inputs and samples of the forward, which the sparse operations share.

Each query attends to the `topk` rows of kv that its indices select.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference

from ..core.cost import D_QK, D_V
from ..core.device import Device
from ..core.operation import Case, CaseOption
from ..core.samples import Sample, samples
from ..core.tolerance import spaced

Array = npt.NDArray[Any]

# ---- Cases -----------------------------------------------------------------------------------------------------------

INDICES = ("random", "clustered")
FORM = "sq<N>-skv<N>-hq<N>-topk<N>[-dqk512][-clustered]"


@dataclass(frozen=True)
class SparseCase(Case):
    """One sequence whose last `s_q` tokens are the queries. `indices` says how rows are selected: see `choose_indices`.

    The microseconds are the best peer's on one H200 on one day with random indices, and our target there; for
    orientation only.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int = 2048
    d_qk: int = D_QK
    indices: str = "random"
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def seen(self) -> dict[str, float | None]:
        return {"best peer": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        name = f"sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}-topk{self.topk}"
        if self.d_qk != D_QK:
            name += f"-dqk{self.d_qk}"
        return name if self.indices == "random" else f"{name}-{self.indices}"

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a selected row."""
        return self.s_q * self.topk

    def shape(self) -> dict[str, Any]:
        names = ("s_q", "s_kv", "h_q", "topk", "d_qk", "indices")
        return {**{name: getattr(self, name) for name in names}, "d_v": D_V}


PATTERN = r"sq(\d+)-skv(\d+)-hq(\d+)-topk(\d+)(?:-dqk(\d+))?(-clustered)?"


def fields_of(s_q: str, s_kv: str, h_q: str, topk: str, d_qk: str | None, clustered: str | None) -> dict[str, Any]:
    """The fields of a case from the groups of `PATTERN`."""
    sizes = {"s_q": int(s_q), "s_kv": int(s_kv), "h_q": int(h_q), "topk": int(topk)}
    width = int(d_qk or D_QK)
    if min(sizes.values()) < 1 or width not in (D_QK, D_V):
        raise ValueError(f"every size must be at least 1, and dqk {D_QK} or {D_V}")
    return {**sizes, "d_qk": width, "indices": "clustered" if clustered else "random"}


def with_indices(name: str, indices: str) -> str:
    """The name of the same case with other indices."""
    return name.removesuffix("-clustered") + ("-clustered" if indices == "clustered" else "")


CASE_OPTIONS = {
    "indices": CaseOption(
        choices=INDICES,
        help="how the rows of each query are selected, in every case: uniformly from the visible ones, or sinks, "
        "recent tokens and blocks that neighbouring queries share (default: as the case's name says, random)",
        rename=with_indices,
    )
}


# ---- Inputs and outputs ----------------------------------------------------------------------------------------------

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


# ---- Check -----------------------------------------------------------------------------------------------------------

QUERIES = 5


def sampled_queries(case: SparseCase) -> npt.NDArray[np.int64]:
    """The queries that are checked, with all their heads."""
    return spaced(case.s_q, QUERIES)


def expect_forward(case: SparseCase, dtype: str, inputs: SparseInputs, device: Device, **options: Any) -> list[Sample]:
    """The oracle's out, lse and max_logits of a few queries; `options` go to the oracle."""
    queries = sampled_queries(case)
    arguments = device.take(inputs.q, queries), device.to_host(inputs.kv), inputs.host_indices[queries]
    want, rounded = (
        reference.sparse_mla_forward(*arguments, scale=case.scale, rounding=rounding, **options)
        for rounding in (None, dtype)
    )
    outputs = zip(("out", "lse", "max_logits"), want, rounded, strict=True)
    return [sample for name, exact, near in outputs for sample in samples(name, queries, exact, near, dtype)]
