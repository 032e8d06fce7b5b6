"""The cases of the indexer's losses: sequences of equal length, each query causal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = (
    "b<N>-s<N>-h<N>x<N>-i<N>x<N>: sequences, their length, heads x width, index heads x width; then -perhead for "
    "targets per head, or -k<N> for the sparse stage with as many selected keys; -mha for keys per head, whose last 64 "
    "columns all heads share; -fp8 for index queries and keys in e4m3"
)
INDEX_DIMS = (32, 64, 128)
D_ROPE = 64
"""Last columns of keys per head, which all heads share."""


@dataclass(frozen=True)
class LossCase:
    """The microseconds are those of the best peer on one H200 on one day, and our target there, for orientation."""

    b: int
    s: int
    h: int
    d: int
    h_i: int
    d_i: int
    per_head: bool = False
    topk: int = 0
    mha: bool = False
    fp8: bool = False
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "indexer_sparse_loss" if self.topk else "indexer_warmup_loss"

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""
        return {"cudnn-frontend": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        more = "-perhead" if self.per_head else f"-k{self.topk}" if self.topk else ""
        more += ("-mha" if self.mha else "") + ("-fp8" if self.fp8 else "")
        return f"b{self.b}-s{self.s}-h{self.h}x{self.d}-i{self.h_i}x{self.d_i}{more}"

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return self.b * self.s

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that counts for it."""
        short = min(self.s, self.topk or self.s)  # queries that see no more than they may select
        return self.b * (short * (short + 1) // 2 + (self.s - short) * short)

    @property
    def cost(self) -> Cost:
        """The scores of attention and indexer once, and four products of the indexer's size for gradients; per head the
        attention's output, too, of the same width.
        """
        attention = (2 if self.per_head else 1) * self.h * self.d
        own = self.h * (self.d - D_ROPE) + D_ROPE if self.mha else self.d
        vectors = (self.h_i + 1) * self.d_i  # of the indexer, and their gradients
        elements = self.h * self.d + own + vectors
        numbers = self.h + 2 * self.h_i + 3 + self.topk
        scored = vectors * (1 if self.fp8 else ELEMENT_BYTES)
        nbytes = self.tokens * (ELEMENT_BYTES * elements + scored + SINGLE_BYTES * numbers)
        return Cost(2 * self.pairs * (attention + 5 * self.h_i * self.d_i), nbytes)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {
            name: getattr(self, name) for name in ("b", "s", "h", "d", "h_i", "d_i", "per_head", "topk", "mha", "fp8")
        }


DENSE = (
    LossCase(4, 2048, 64, 128, 64, 64, peer_us=2670, target_us=2200),
    LossCase(1, 8192, 128, 576, 64, 128, peer_us=20000, target_us=16000),
    LossCase(1, 4096, 128, 576, 64, 128),
    LossCase(16, 2048, 64, 128, 64, 64),
    LossCase(1, 32768, 64, 128, 32, 128),
)
# The same attention as of 128 x 576, un-absorbed; and training in FP8.
UNABSORBED = (
    LossCase(1, 8192, 128, 192, 64, 128, mha=True, target_us=8500),
    LossCase(1, 8192, 128, 192, 64, 128, mha=True, fp8=True),
)
SPARSE = (
    LossCase(1, 4096, 128, 576, 64, 128, topk=2048),
    LossCase(1, 16384, 128, 576, 64, 128, topk=2048),
)
# The table of the operator that had a target per head first (lemyx/tilelang-dsa). The larger cases have arrays of
# gigabytes: they have a suite, and run only there.
PER_HEAD = tuple(LossCase(b, 2048, 64, 128, 64, 64, per_head=True) for b in (4, 8, 16, 32, 64))
CASES: tuple[LossCase, ...] = (*DENSE, *UNABSORBED, *SPARSE, PER_HEAD[0])
SUITES: Mapping[str, tuple[LossCase, ...]] = {
    "targets": CASES,
    "quick": DENSE[:2],
    "sparse": SPARSE,
    "unabsorbed": (DENSE[1], *UNABSORBED),
    "per-head": PER_HEAD,
    "aims": (*DENSE[:2], PER_HEAD[0], SPARSE[0]),
}

_PATTERN = re.compile(r"b(\d+)-s(\d+)-h(\d+)x(\d+)-i(\d+)x(\d+)(-perhead)?(?:-k([1-9]\d*))?(-mha)?(-fp8)?")


def parse(name: str) -> LossCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    b, s, h, d, h_i, d_i = map(int, match.groups()[:6])
    per_head, topk = match[7] is not None, int(match[8] or 0)
    if min(b, s, h, d, h_i) < 1 or d > 576 or d_i not in INDEX_DIMS:
        raise BenchError(f"case {name!r}: every size must be at least 1, d at most 576, d_i one of {INDEX_DIMS}")
    if per_head and (topk or h != h_i):
        raise BenchError(f"case {name!r}: per head there are as many index heads as heads, and all keys count")
    mha, fp8 = match[9] is not None, match[10] is not None
    if mha and (topk or d <= D_ROPE):
        raise BenchError(f"case {name!r}: keys per head are all keys, of more than {D_ROPE} columns")
    case = LossCase(b, s, h, d, h_i, d_i, per_head, topk, mha, fp8)
    return next((known for known in CASES if known == case), case)
