"""The cases of the indexer's preparation: sizes, cost, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "sq<N>-h<N>[-d<N>][-keys]"
HEAD_DIMS = (32, 64, 128)
MAX_POSITION = 4096


@dataclass(frozen=True)
class PrepareCase:
    """Vectors of `s_q` tokens and `h` heads; with `keys` those of the tokens, too, from before their LayerNorm."""

    s_q: int
    h: int
    d: int = 128
    keys: bool = False

    @property
    def op(self) -> str:
        return "indexer_prepare" if self.keys else "indexer_prepare_q"

    @property
    def seen(self) -> dict[str, float | None]:
        """Nothing was measured yet."""
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        return f"sq{self.s_q}-h{self.h}" + ("" if self.d == 128 else f"-d{self.d}") + "-keys" * self.keys

    @property
    def rope_pairs(self) -> int:
        """Half of each vector turns."""
        return self.d // 4

    @property
    def cost(self) -> Cost:
        """A vector in and its codes out, a weight in and out; RoPE's tables and positions once. FLOPs do not count."""
        per_vector = self.d * ELEMENT_BYTES + self.d + 2 * SINGLE_BYTES
        tables = 2 * min(self.s_q, MAX_POSITION) * self.rope_pairs * SINGLE_BYTES
        keys = self.s_q * (per_vector - SINGLE_BYTES) if self.keys else 0
        return Cost(0, self.s_q * self.h * per_vector + keys + tables + SINGLE_BYTES * self.s_q)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {name: getattr(self, name) for name in ("s_q", "h", "d", "keys")}


CASES: tuple[PrepareCase, ...] = (
    PrepareCase(4096, 64),
    PrepareCase(64, 64),
    PrepareCase(4096, 1),
    PrepareCase(128, 64, keys=True),
    PrepareCase(4096, 64, keys=True),
)
SUITES: Mapping[str, tuple[PrepareCase, ...]] = {"targets": CASES, "quick": CASES[:1]}

_PATTERN = re.compile(r"sq(\d+)-h(\d+)(?:-d(\d+))?(-keys)?")


def parse(name: str) -> PrepareCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    s_q, h, d = (int(text) if text else 128 for text in match.groups()[:3])
    if min(s_q, h) < 1 or d not in HEAD_DIMS:
        raise BenchError(f"case {name!r}: every size must be at least 1, d one of {HEAD_DIMS}")
    case = PrepareCase(s_q, h, d, bool(match[4]))
    return next((known for known in CASES if known == case), case)
