"""Problem and options of the selection in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mla_cupy.kernels.indexer.logits.problem import LogitsProblem


@dataclass(frozen=True)
class SelectProblem:
    """A call's logits, and what decides besides."""

    logits: LogitsProblem
    order: str


class SelectOptions(NamedTuple):
    """The arguments beside the arrays."""

    topk: int
    slots: bool
    order: str
    keep_first: int
    keep_last: int
    kernel: str | None
