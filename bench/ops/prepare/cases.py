"""The cases of the preparation before decode: what becomes of queries, the record of the cache, tokens and heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_cupy.cache_formats import FORMATS, LATENT_FORMATS

from ...core.cost import D_QK, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "<inplace, new or codes>-<record or none>-n<N>-h<N>[-theta]"
KINDS = ("inplace", "new", "codes")
PAGE_SIZE = 64
MAX_POSITION = 4096
D_ROPE = 64


@dataclass(frozen=True)
class MlaPrepareCase:
    """`n` tokens of `h` heads: the RoPE part turns where it lies, or with all columns into a new array, or codes.

    The tokens go to the pages of `record`, all over them; without one there are queries alone.
    """

    kind: str
    record: str
    n: int
    h: int
    theta: bool = False

    op = "mla_prepare"

    @property
    def seen(self) -> dict[str, float | None]:
        """Nothing was measured yet."""
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        return f"{self.kind}-{self.record or 'none'}-n{self.n}-h{self.h}{'-theta' if self.theta else ''}"

    @property
    def d(self) -> int:
        """Width of the queries: what the record's keys have."""
        return FORMATS[self.record].d_qk if self.record else D_QK

    @property
    def cost(self) -> Cost:
        """Bytes that are read and written once, of queries and tokens; RoPE's tables and positions once."""
        of_query = {
            "inplace": 2 * D_ROPE * ELEMENT_BYTES,
            "new": 2 * self.d * ELEMENT_BYTES,
            "codes": self.d * (ELEMENT_BYTES + 1) + SINGLE_BYTES,
        }[self.kind]
        tables = 0 if self.theta else 2 * min(self.n, MAX_POSITION) * D_ROPE // 2 * SINGLE_BYTES
        of_token = SINGLE_BYTES  # its position
        if self.record:
            of_token += SINGLE_BYTES + self.d * ELEMENT_BYTES + FORMATS[self.record].token_bytes
        return Cost(0, self.n * (self.h * of_query + of_token) + tables)

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {name: getattr(self, name) for name in ("kind", "record", "n", "h", "theta")}


CASES: tuple[MlaPrepareCase, ...] = (
    MlaPrepareCase("inplace", "bf16", 128, 128),
    MlaPrepareCase("inplace", "fp8", 128, 128),
    MlaPrepareCase("inplace", "v32", 128, 128),
    MlaPrepareCase("inplace", "bf16", 128, 16),
    MlaPrepareCase("inplace", "bf16", 128, 128, theta=True),
    MlaPrepareCase("codes", "fp8", 128, 128),
    MlaPrepareCase("codes", "fp8", 8192, 128),
    MlaPrepareCase("codes", "", 8192, 128),
    MlaPrepareCase("inplace", "v32", 8192, 128),
    MlaPrepareCase("new", "v4", 8192, 128),
)
SUITES: Mapping[str, tuple[MlaPrepareCase, ...]] = {"targets": CASES, "quick": (CASES[0], CASES[5])}

_PATTERN = re.compile(r"([a-z]+)-([a-z0-9]+)-n(\d+)-h(\d+)(-theta)?")


def parse(name: str) -> MlaPrepareCase:
    """The case of that name: one of `CASES`, or any other written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    kind, record, n, h = match[1], match[2], int(match[3]), int(match[4])
    known = [layout.name for layout in LATENT_FORMATS if layout.d_rope]
    if kind not in KINDS or record not in (*known, "none"):
        raise BenchError(f"case {name!r}: expected one of {', '.join(KINDS)}, and none or one of {', '.join(known)}")
    if min(n, h) < 1:
        raise BenchError(f"case {name!r}: every size must be at least 1")
    case = MlaPrepareCase(kind, "" if record == "none" else record, n, h, bool(match[5]))
    return next((found for found in CASES if found == case), case)
