"""The cases of decode over a shared prefix: those of dense decode, with block tables that begin alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ...core.errors import BenchError
from ..decode.cases import DecodeCase

FORM = "b<N>-hq<N>-prefix<N>-suffix<N>"


@dataclass(frozen=True)
class CascadeCase(DecodeCase):
    """All sequences share the first `prefix` tokens, and have the others of `s_kv` for themselves; whole pages."""

    prefix: int = 0

    @property
    def op(self) -> str:
        return "cascade_decode"

    @property
    def name(self) -> str:
        return f"b{self.b}-hq{self.h_q}-prefix{self.prefix}-suffix{self.s_kv - self.prefix}"

    @property
    def prefix_pages(self) -> int:
        """Pages that all sequences share."""
        return self.prefix // self.page_size

    @property
    def num_pages(self) -> int:
        return self.prefix_pages + self.b * (self.max_pages - self.prefix_pages)

    @property
    def cost(self) -> Cost:
        """The products of plain decode; every page of the cache once."""
        queries_and_out = self.b * self.s_q * self.h_q * (D_QK + D_V) * ELEMENT_BYTES
        cache = self.num_pages * self.page_size * D_QK * ELEMENT_BYTES
        return Cost(super().cost.flops, cache + queries_and_out)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "prefix": self.prefix}


def case_of(b: int, h_q: int, prefix: int, suffix: int) -> CascadeCase:
    """A case with one query per sequence."""
    return CascadeCase(b, 1, h_q, prefix + suffix, prefix=prefix)


CASES: tuple[CascadeCase, ...] = (
    *(case_of(64, h_q, 16384, 256) for h_q in (8, 16, 32, 64)),
    case_of(64, 16, 2048, 256),
    case_of(16, 16, 16384, 256),
    case_of(8, 16, 8192, 256),
)
SUITES: Mapping[str, tuple[CascadeCase, ...]] = {"targets": CASES, "quick": CASES[:2]}

_PATTERN = re.compile(r"b(\d+)-hq(\d+)-prefix(\d+)-suffix(\d+)")


def parse(name: str) -> CascadeCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    b, h_q, prefix, suffix = map(int, match.groups())
    case = case_of(b, h_q, prefix, suffix)
    if min(b, h_q, prefix, suffix) < 1 or prefix % case.page_size or suffix % case.page_size:
        raise BenchError(f"case {name!r}: every size must be at least 1, and tokens whole pages of {case.page_size}")
    return next((known for known in CASES if known == case), case)
