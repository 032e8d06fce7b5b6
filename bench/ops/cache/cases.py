"""The cases of the paged cache: an operation, a record, and how many tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_cupy.cache_formats import FORMATS, LATENT_FORMATS

from ...core.cost import ELEMENT_BYTES, Cost
from ...core.errors import BenchError

FORM = "<append, gather or copy>-<record>-n<N>[-scattered]"
PAGE_SIZE = 64
KINDS = {"append": "cache_append", "gather": "cache_gather", "copy": "cache_copy_pages"}
SLOT_BYTES = 4


@dataclass(frozen=True)
class CacheCase:
    """`tokens` are written, read, or those of the pages that are copied.

    Pages are in random order, and their tokens side by side, as a prompt's step has them; `scattered` ones are not.
    """

    kind: str
    record: str
    tokens: int
    scattered: bool = False

    @property
    def op(self) -> str:
        return KINDS[self.kind]

    @property
    def seen(self) -> dict[str, float | None]:
        """Nothing was measured yet."""
        return {}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads."""
        return f"{self.kind}-{self.record}-n{self.tokens}{'-scattered' if self.scattered else ''}"

    @property
    def pages(self) -> int:
        """The number of pages that the tokens fill."""
        return self.tokens // PAGE_SIZE

    @property
    def cost(self) -> Cost:
        """A record and a 16-bit row per token, one read and the other written, and a slot; or a record, both."""
        record = FORMATS[self.record]
        row = record.d_qk * ELEMENT_BYTES + SLOT_BYTES
        return Cost(0, self.tokens * (record.token_bytes + (record.token_bytes if self.kind == "copy" else row)))

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        return {
            "kind": self.kind,
            "record": self.record,
            "tokens": self.tokens,
            "page_size": PAGE_SIZE,
            "scattered": self.scattered,
        }


CASES: tuple[CacheCase, ...] = (
    *(CacheCase("append", record, tokens) for record in ("v32", "v4", "bf16") for tokens in (8192, 65536)),
    *(CacheCase("gather", record, tokens) for record in ("v32", "v4", "bf16") for tokens in (8192, 65536)),
    *(CacheCase("copy", "v32", tokens) for tokens in (8192, 65536)),
    *(CacheCase(kind, record, 65536, scattered=True) for kind in ("append", "gather") for record in ("v32", "v4")),
    CacheCase("append", "v32", 128, scattered=True),  # a step of decoding
)
SUITES: Mapping[str, tuple[CacheCase, ...]] = {
    "targets": CASES,
    "quick": tuple(case for case in CASES if case.record == "v32" and case.tokens == 65536),
}

_PATTERN = re.compile(r"([a-z]+)-([a-z0-9]+)-n(\d+)(-scattered)?")


def parse(name: str) -> CacheCase:
    """The case of that name: one of `CASES`, or any other written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    kind, record, tokens = match[1], match[2], int(match[3])
    known = [layout.name for layout in LATENT_FORMATS if layout.d_rope and layout.name != "fp8"]
    if kind not in KINDS or record not in known:
        raise BenchError(f"case {name!r}: expected one of {', '.join(KINDS)}, and a record of {', '.join(known)}")
    scattered = bool(match[4])
    if tokens < 1 or (kind == "copy" and (tokens % PAGE_SIZE or scattered)):
        raise BenchError(f"case {name!r}: one token at least, and whole pages of {PAGE_SIZE} to copy")
    case = CacheCase(kind, record, tokens, scattered)
    return next((found for found in CASES if found == case), case)
