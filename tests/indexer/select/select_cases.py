"""Calls that select in one launch, and what they must select."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_cupy import reference
from tests.support.indexer_cases import PagedCase, paged_inputs

Array = np.ndarray[Any, Any]
KERNEL = "indexer_select_sm90_paged"
LOGITS = "indexer_logits_sm90_paged"
PAGE_SIZE, HEAD_DIM = 64, 128


@dataclass(frozen=True)
class SelectCase:
    """Arrays and options of a call. `levels`: there are so many different keys, and most logits are equal."""

    paged: PagedCase
    topk: int
    slots: bool = True
    keep_first: int = 0
    keep_last: int = 0
    levels: int = 0

    @property
    def id(self) -> str:
        kept = f"-keep{self.keep_first}.{self.keep_last}" if self.keep_first or self.keep_last else ""
        levels = f"-levels{self.levels}" if self.levels else ""
        return f"{self.paged.id}-k{self.topk}{'-slots' * self.slots}{kept}{levels}"

    @property
    def options(self) -> dict[str, Any]:
        """Of `indexer_select_paged`."""
        return {name: getattr(self, name) for name in ("topk", "slots", "keep_first", "keep_last")}

    def inputs(self) -> dict[str, Array]:
        """The arrays by name."""
        made = paged_inputs(self.paged)
        if self.levels:
            _repeat_keys(made["cache"], self.levels)
        return made


def _repeat_keys(cache: Array, levels: int) -> None:
    rng = np.random.default_rng(levels)
    pages = len(cache)
    flat = cache.reshape(pages, -1)
    chosen = rng.integers(0, levels, (pages, PAGE_SIZE))
    keys = rng.integers(0x28, 0x40, (levels, HEAD_DIM)).astype(np.uint8)
    flat[:, : PAGE_SIZE * HEAD_DIM] = keys[chosen].reshape(pages, -1)
    flat[:, PAGE_SIZE * HEAD_DIM :] = np.ones((pages, PAGE_SIZE), np.float32).view(np.uint8)


def expected(case: SelectCase, inputs: dict[str, Array], logits: Array) -> tuple[Array, Array]:
    """The oracle's selection from the logits of another kernel, whose bits are the same."""
    (b, s_q), ends = inputs["q"].shape[:2], inputs["seqlens"].astype(np.int64)
    if ends.ndim == 1:
        ends = np.maximum(ends, 0)[:, None] - np.arange(s_q)[::-1]
    table = {"block_table": inputs["block_table"], "page_size": PAGE_SIZE} if case.slots else {}
    kept = {"keep_first": case.keep_first, "keep_last": case.keep_last}
    flat = logits.reshape(b * s_q, -1).astype(np.float32)
    indices, counts, _ = reference.indexer_topk(flat, ke=ends.reshape(-1), k=case.topk, **kept, **table)
    return indices.reshape(b, s_q, -1), counts.reshape(b, s_q)


def check(case: SelectCase, inputs: dict[str, Array], got: tuple[Array, Array], logits: Array) -> None:
    """Equal, index by index."""
    for x, wanted in zip(got, expected(case, inputs, logits), strict=True):
        np.testing.assert_array_equal(x, wanted)
