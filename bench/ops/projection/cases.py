"""The cases of projections: W_UK or W_UV, tokens, heads, and partial results to merge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "absorb-t<N>-hq<N>, or project-n<N>-t<N>-hq<N>"
D_HEAD = 128


@dataclass(frozen=True)
class ProjectionCase:
    """`tokens` of `h_q` heads; `states` partial results of each in float32, one in 16 bits, or 0: queries."""

    tokens: int
    h_q: int
    states: int = 0

    @property
    def op(self) -> str:
        return "merge_project" if self.states else "absorb"

    @property
    def seen(self) -> dict[str, float | None]:
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        kind = f"project-n{self.states}" if self.states else "absorb"
        return f"{kind}-t{self.tokens}-hq{self.h_q}"

    @property
    def cost(self) -> Cost:
        """The weights, what is multiplied by them, and the result, once each."""
        rows, weights = self.tokens * self.h_q, self.h_q * D_HEAD * D_V
        partial = self.states * (D_V * (SINGLE_BYTES if self.states > 1 else ELEMENT_BYTES))
        lses = SINGLE_BYTES * self.states if self.states > 1 else 0
        narrow, wide = ELEMENT_BYTES * D_HEAD, ELEMENT_BYTES * D_V
        of_row = partial + lses + narrow if self.states else narrow + wide
        return Cost(2 * rows * D_HEAD * D_V, ELEMENT_BYTES * weights + rows * of_row)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {"tokens": self.tokens, "h_q": self.h_q, "states": self.states, "d_head": D_HEAD}


TOKENS = (1, 4, 16, 32, 64, 128, 256, 512)
"""Tokens of a step, from one sequence to where a matrix product by cuBLAS wins."""
CASES: tuple[ProjectionCase, ...] = (
    *(ProjectionCase(tokens, h_q) for h_q in (16, 128) for tokens in TOKENS),
    *(ProjectionCase(tokens, h_q, 1) for h_q in (16, 128) for tokens in TOKENS),
    *(ProjectionCase(tokens, 128, states) for tokens, states in ((1, 66), (4, 17), (16, 5))),
    *(ProjectionCase(tokens, 16, states) for tokens, states in ((1, 132), (16, 9), (64, 2))),
)
SUITES: Mapping[str, tuple[ProjectionCase, ...]] = {
    "targets": CASES,
    "quick": tuple(case for case in CASES if case.h_q == 128 and case.tokens == 16),
}

_PATTERN = re.compile(r"(absorb|project-n(\d+))-t(\d+)-hq(\d+)")


def parse(name: str) -> ProjectionCase:
    """The case of that name: one of `CASES`, or any other written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match or min(int(match[3]), int(match[4]), int(match[2] or 1)) < 1:
        raise BenchError(f"case {name!r}: expected {FORM}, with sizes of at least 1; `list` prints the built-in ones")
    case = ProjectionCase(int(match[3]), int(match[4]), int(match[2] or 0))
    return next((found for found in CASES if found == case), case)
