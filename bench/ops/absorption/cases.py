"""The cases: `s_q` query tokens at the end of one sequence in a paged cache, from decode to prefill."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.cost import D_QK, D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError
from ..decode.cases import DecodeCase

FORM = "sq<N>-skv<N>-hq<N>"
D_NOPE, D_ROPE, D_HEAD = 128, 64, 128
"""Widths of a head: the columns without and with position of queries and keys, and those of values."""
D_EXPANDED = D_NOPE + D_HEAD
"""Width of what kv_b_proj makes of a latent, for each head."""


@dataclass(frozen=True)
class AbsorptionCase(DecodeCase):
    """One sequence, whose last `s_q` of `s_kv` tokens are the queries."""

    @property
    def name(self) -> str:
        return f"sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}"

    @property
    def scale(self) -> float:
        return float((D_NOPE + D_ROPE) ** -0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head."""
        return self.s_q * self.s_kv - self.s_q * (self.s_q - 1) // 2

    @property
    def weights(self) -> int:
        """Elements of kv_b_proj."""
        return D_V * self.h_q * D_EXPANDED

    @property
    def absorbed(self) -> Cost:
        """Both products of the queries and results with kv_b_proj, and attention to the cache as it lies."""
        rows = self.s_q * self.h_q
        flops = 2 * self.pairs * self.h_q * (D_QK + D_V) + 2 * rows * D_V * D_EXPANDED
        elements = self.s_kv * D_QK + self.weights
        elements += rows * (D_NOPE + 2 * D_QK + 2 * D_V + D_HEAD)  # each intermediate is written and read
        return Cost(flops, ELEMENT_BYTES * elements)

    @property
    def unabsorbed(self) -> Cost:
        """Reading the cache, the product of all tokens with kv_b_proj, and attention to keys and values per head."""
        rows, expanded = self.s_q * self.h_q, self.s_kv * self.h_q * D_EXPANDED
        flops = 2 * self.pairs * self.h_q * (D_NOPE + D_ROPE + D_HEAD) + 2 * self.s_kv * self.weights
        elements = 3 * self.s_kv * D_QK + self.weights + 2 * expanded + rows * (D_NOPE + D_ROPE + D_HEAD)
        return Cost(flops, ELEMENT_BYTES * elements + 2 * SINGLE_BYTES * self.s_kv)

    @property
    def cost(self) -> Cost:
        """Cost of absorbed attention alone, which is what ours in a row is."""
        flops = 2 * self.pairs * self.h_q * (D_QK + D_V)
        return Cost(flops, ELEMENT_BYTES * (self.s_kv * D_QK + self.s_q * self.h_q * (D_QK + D_V)))

    def shape(self) -> dict[str, Any]:
        forms = {"absorbed": self.absorbed, "unabsorbed": self.unabsorbed}
        counts = {f"{form}_flops": cost.flops for form, cost in forms.items()}
        return {**super().shape(), **counts, **{f"{form}_bytes": cost.nbytes for form, cost in forms.items()}}


def case_of(s_q: int, s_kv: int, h_q: int) -> AbsorptionCase:
    """A case of one sequence."""
    return AbsorptionCase(1, s_q, h_q, s_kv)


CASES = tuple(case_of(s_q, 8192, h_q) for h_q in (16, 128) for s_q in (16, 64, 128, 256, 512, 1024, 2048))
SUITES: Mapping[str, tuple[AbsorptionCase, ...]] = {"targets": CASES, "quick": (CASES[3], CASES[10])}

_PATTERN = re.compile(r"sq(\d+)-skv(\d+)-hq(\d+)")


def parse(name: str) -> AbsorptionCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    s_q, s_kv, h_q = map(int, match.groups())
    if min(s_q, h_q) < 1 or s_q > s_kv:
        raise BenchError(f"case {name!r}: every size must be at least 1, and sq at most skv")
    case = case_of(s_q, s_kv, h_q)
    return next((known for known in CASES if known == case), case)
