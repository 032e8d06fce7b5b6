"""The cases of the indexer's top-k: sizes, distributions, cost, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.cost import SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "sq<N>-skv<N>-k<N>[-hot]"
MAX_TOPK = 8192


@dataclass(frozen=True)
class TopkCase:
    """`hot`: the logits share 32 values of their upper 11 bits, where a histogram of digits collides; else normal."""

    s_q: int
    s_kv: int
    k: int
    hot: bool = False

    op = "indexer_topk"

    @property
    def seen(self) -> dict[str, float | None]:
        """Nothing was measured yet."""
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        return f"sq{self.s_q}-skv{self.s_kv}-k{self.k}" + ("-hot" if self.hot else "")

    @property
    def cost(self) -> Cost:
        """One read of the logits, so that the share of the copy rate is how near a call is to it; no FLOP."""
        return Cost(0, SINGLE_BYTES * self.s_q * self.s_kv)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {name: getattr(self, name) for name in ("s_q", "s_kv", "k", "hot")}


CASES: tuple[TopkCase, ...] = (
    TopkCase(4096, 32768, 2048),
    TopkCase(4096, 32768, 2048, hot=True),
    TopkCase(64, 131072, 2048),
    TopkCase(1, 131072, 2048),
    TopkCase(4096, 8192, 512),
)
SUITES: Mapping[str, tuple[TopkCase, ...]] = {"targets": CASES, "quick": CASES[:2]}

_PATTERN = re.compile(r"sq(\d+)-skv(\d+)-k(\d+)(-hot)?")


def parse(name: str) -> TopkCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    *texts, hot = match.groups()
    s_q, s_kv, k = map(int, texts)
    if min(s_q, s_kv, k) < 1 or k > min(s_kv, MAX_TOPK):
        raise BenchError(f"case {name!r}: every size must be at least 1, k at most skv and {MAX_TOPK}")
    case = TopkCase(s_q, s_kv, k, bool(hot))
    return next((known for known in CASES if known == case), case)
