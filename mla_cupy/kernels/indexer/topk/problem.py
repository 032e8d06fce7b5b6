"""Problems, options and sizes that the indexer's kernels share on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_TOPK = 8192
"""The largest k of a selection."""
HEAD_DIMS = (32, 64, 128)
"""Widths of an index key."""


@dataclass(frozen=True)
class TopkProblem:
    """Sizes that decide which kernel selects."""

    s_q: int
    s_kv: int
    k: int


class TopkOptions(NamedTuple):
    """A call's arguments other than arrays: as passed, then as resolved by the checks."""

    k: int
    order: str
    relative: bool
    page_size: int
    keep_first: int
    keep_last: int
    return_values: bool
    kernel: str | None
