"""The cases of the indexer's warm-up loss: sequences of equal length, each query causal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "b<N>-s<N>-h<N>x<N>-i<N>x<N>: sequences, their length, heads x width, index heads x width"
INDEX_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class LossCase:
    """The microseconds are those of the best peer on one H200 on one day, and our target there, for orientation."""

    b: int
    s: int
    h: int
    d: int
    h_i: int
    d_i: int
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "indexer_warmup_loss"

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""
        return {"cudnn-frontend": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        return f"b{self.b}-s{self.s}-h{self.h}x{self.d}-i{self.h_i}x{self.d_i}"

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.b * self.s

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return self.b * self.s * (self.s + 1) // 2

    @property
    def cost(self) -> Cost:
        """The scores of attention and indexer once, and four products of the indexer's size for gradients."""
        queries = self.h * self.d + 2 * self.h_i * self.d_i
        keys = self.d + 2 * self.d_i
        numbers = self.h + 2 * self.h_i + 3
        nbytes = self.tokens * (ELEMENT_BYTES * (queries + keys) + SINGLE_BYTES * numbers)
        return Cost(2 * self.pairs * (self.h * self.d + 5 * self.h_i * self.d_i), nbytes)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {name: getattr(self, name) for name in ("b", "s", "h", "d", "h_i", "d_i")}


CASES: tuple[LossCase, ...] = (
    LossCase(4, 2048, 64, 128, 64, 64, peer_us=2670, target_us=2200),
    LossCase(1, 8192, 128, 576, 64, 128, peer_us=20000, target_us=16000),
    LossCase(1, 4096, 128, 576, 64, 128),
    LossCase(16, 2048, 64, 128, 64, 64),
    LossCase(1, 32768, 64, 128, 32, 128),
)
SUITES: Mapping[str, tuple[LossCase, ...]] = {"targets": CASES, "quick": CASES[:2]}

_PATTERN = re.compile(r"b(\d+)-s(\d+)-h(\d+)x(\d+)-i(\d+)x(\d+)")


def parse(name: str) -> LossCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    b, s, h, d, h_i, d_i = map(int, match.groups())
    if min(b, s, h, d, h_i) < 1 or d > 576 or d_i not in INDEX_DIMS:
        raise BenchError(f"case {name!r}: every size must be at least 1, d at most 576, d_i one of {INDEX_DIMS}")
    case = LossCase(b, s, h, d, h_i, d_i)
    return next((known for known in CASES if known == case), case)
