"""Calls that select through lists of candidates, with logits of any bits, and what they must select."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import reference
from mla_cupy.kernels.indexer.select.candidates import CANDIDATE_BYTES, sampling_of

Array = npt.NDArray[Any]
KERNEL = "indexer_logits_sm90"
LISTS = {"candidates": KERNEL}
CHUNKS = {"logits": KERNEL}
ONE = 0x38
"""The code of 1 in e4m3."""
WILD = (-(2**31), 2**31 - 1)


def logits_of_kind(kind: str, keys: int, step: int) -> Array:
    """Logits of a row; the sample has every `step`-th of them."""
    rng = np.random.default_rng(keys)
    made, sampled = rng.standard_normal(keys).astype(np.float32), np.arange(keys) % step == 0
    if kind == "equal":
        made[:] = 0.5
    elif kind == "levels":
        made = rng.integers(-1, 2, keys).astype(np.float32)
    elif kind == "zeros":
        made = np.where(rng.random(keys) < 0.5, np.float32(-0.0), np.float32(0))
    elif kind == "nan":
        made[rng.random(keys) < 0.5] = np.nan
    elif kind == "mostly-nan":
        made[rng.random(keys) < 0.99] = np.nan
    elif kind == "infinite":
        made[rng.random(keys) < 0.1] = np.inf
        made[rng.random(keys) < 0.1] = -np.inf
    elif kind in ("rising", "falling"):
        made = np.sort(made) if kind == "rising" else -np.sort(made)
    elif kind == "sample-above":  # fewer than k logits reach the limit
        made[sampled] += 100
    elif kind == "sample-below":  # more than a list holds reach it
        made[sampled] -= 100
    return made


@dataclass(frozen=True)
class CandidateCase:
    """A call; `rows`: rows of a chunk. `ranges` are "none", "causal", "windows", "packed" or "wild"."""

    kind: str = "random"
    s_q: int = 20
    s_kv: int = 1500
    k: int = 40
    ranges: str = "none"
    relative: bool = True
    rows: int = 64
    heads: int = 1

    @property
    def id(self) -> str:
        size = f"q{self.s_q}-kv{self.s_kv}-h{self.heads}-k{self.k}"
        return f"{self.kind}-{size}-{self.ranges}-rows{self.rows}{'-absolute' * (not self.relative)}"

    @property
    def options(self) -> dict[str, Any]:
        """Of `indexer_select`."""
        capacity = sampling_of(self.k, self.s_kv).capacity
        return {"topk": self.k, "relative": self.relative, "buffer_bytes": self.rows * CANDIDATE_BYTES * capacity}

    def inputs(self) -> dict[str, Array]:
        """Logits are the scales of the keys, in odd rows with the other sign."""
        q, k = np.zeros((self.s_q, self.heads, 128), np.uint8), np.zeros((self.s_kv, 128), np.uint8)
        q[..., 0] = k[..., 0] = ONE
        weights = np.zeros((self.s_q, self.heads), np.float32)
        weights[:, 0] = np.where(np.arange(self.s_q) % 2, -1, 1)
        step = 1 << sampling_of(self.k, self.s_kv).shift
        scales = logits_of_kind(self.kind, self.s_kv, step)
        return {"q": q, "k": k, "weights": weights, "k_scale": scales, **self._ranges()}

    def _ranges(self) -> dict[str, Array]:
        tokens, keys = np.arange(self.s_q), self.s_kv
        if self.ranges == "none":
            return {}
        begins, ends = np.zeros(self.s_q, np.int64), 1 + tokens * keys // self.s_q
        if self.ranges == "windows":
            begins = np.maximum(0, ends - keys // 3)
        elif self.ranges == "packed":
            begins = np.where(tokens < self.s_q // 2, 0, keys // 2 - 3)
            ends = np.where(tokens < self.s_q // 2, keys // 2 - 3, keys)
        elif self.ranges == "wild":
            begins, ends = np.resize((*WILD, 5), self.s_q), np.resize((WILD[1], WILD[1], WILD[0], 700), self.s_q)
        made = {"ks": begins.astype(np.int32), "ke": ends.astype(np.int32)}
        return {"ke": made["ke"]} if self.ranges == "causal" else made


def expected(case: CandidateCase, inputs: dict[str, Array], logits: Array) -> tuple[Array, Array]:
    """The oracle's selection from logits of the kernel."""
    bounds = {name: inputs.get(name) for name in ("ks", "ke")}
    return reference.indexer_topk(logits, **bounds, k=case.k, relative=case.relative)[:2]


def check(case: CandidateCase, inputs: dict[str, Array], got: tuple[Array, Array], logits: Array) -> None:
    """Equal, index by index."""
    for x, wanted in zip(got, expected(case, inputs, logits), strict=True):
        np.testing.assert_array_equal(x, wanted)
