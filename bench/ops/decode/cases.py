"""What a benchmark case is, and the decode cases, each with what peers were seen to reach and what we aim at."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from .costs import D_QK, D_V, Cost, decode_cost
from .errors import BenchError


class Case(Protocol):
    """One shape of one operation."""

    @property
    def op(self) -> str:
        """The public function."""

    @property
    def name(self) -> str:
        """The canonical name, without spaces."""

    @property
    def cost(self) -> Cost: ...

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by whose they are."""

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""


@dataclass(frozen=True)
class DecodeCase:
    """One dense paged decode: every sequence has `s_kv` keys.

    The microseconds are what the peers took on one H200 on one day, and what we aim at there. They are for
    orientation: a claim is always a ratio of two figures of one run.
    """

    b: int
    s_q: int
    h_q: int
    s_kv: int
    h_kv: int = 1
    page_size: int = 64
    flashmla_us: float | None = field(default=None, compare=False)
    fa3_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "mla_decode"

    @property
    def name(self) -> str:
        """The canonical name, which `parse` takes back; fields at their default are left out."""
        name = f"b{self.b}-sq{self.s_q}-hq{self.h_q}-skv{self.s_kv}"
        if self.h_kv != 1:
            name += f"-hkv{self.h_kv}"
        if self.page_size != 64:
            name += f"-page{self.page_size}"
        return name

    @property
    def cost(self) -> Cost:
        return decode_cost(self)

    @property
    def seen(self) -> dict[str, float | None]:
        return {"FlashMLA": self.flashmla_us, "FA3": self.fa3_us, "target": self.target_us}

    @property
    def scale(self) -> float:
        return float(D_QK**-0.5)

    @property
    def max_pages(self) -> int:
        """Pages of one sequence."""
        return -(-self.s_kv // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the whole cache."""
        return self.b * self.max_pages

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        names = ("b", "s_q", "h_q", "s_kv", "h_kv", "page_size")
        return {**{name: getattr(self, name) for name in names}, "d_qk": D_QK, "d_v": D_V}


DECODE: tuple[DecodeCase, ...] = (
    # b, s_q, h_q, s_kv
    DecodeCase(128, 1, 128, 4096, flashmla_us=254, fa3_us=269, target_us=235),
    DecodeCase(128, 2, 128, 4096, flashmla_us=494, fa3_us=502, target_us=460),
    DecodeCase(64, 1, 128, 16384, flashmla_us=512, fa3_us=502, target_us=460),
    DecodeCase(128, 1, 64, 4096, flashmla_us=164, fa3_us=170, target_us=148),
    DecodeCase(128, 1, 32, 8192, flashmla_us=300, fa3_us=299, target_us=286),
    DecodeCase(128, 1, 16, 8192, flashmla_us=302, fa3_us=297, target_us=286),
    DecodeCase(128, 4, 16, 8192, flashmla_us=303, fa3_us=302, target_us=288),
    DecodeCase(128, 1, 8, 8192, flashmla_us=297, fa3_us=294, target_us=285),
    DecodeCase(32, 1, 16, 8192, flashmla_us=100, fa3_us=89, target_us=76),
    DecodeCase(16, 1, 128, 8192, flashmla_us=82, fa3_us=80, target_us=66),
    DecodeCase(4, 1, 128, 8192, flashmla_us=48, fa3_us=37, target_us=26),
    DecodeCase(1, 1, 128, 1024, flashmla_us=18.6, fa3_us=16.4, target_us=8),
    DecodeCase(1, 1, 128, 8192, flashmla_us=31.7, fa3_us=24.4, target_us=14),
    DecodeCase(1, 1, 128, 131072, flashmla_us=98.9, fa3_us=92.6, target_us=74),
    DecodeCase(1, 1, 16, 1024, flashmla_us=15.8, fa3_us=13.7, target_us=7),
    DecodeCase(1, 1, 16, 8192, flashmla_us=29.5, fa3_us=19.7, target_us=8),
    DecodeCase(1, 1, 16, 131072, flashmla_us=80.7, fa3_us=60.6, target_us=40),
)

# Large and compute-bound, long, memory-bound, and a single sequence: one row of each kind.
QUICK_NAMES = (
    "b128-sq1-hq128-skv4096",
    "b64-sq1-hq128-skv16384",
    "b128-sq1-hq16-skv8192",
    "b1-sq1-hq128-skv8192",
)

SUITES: dict[str, tuple[DecodeCase, ...]] = {
    "targets": DECODE,
    "quick": tuple(case for case in DECODE if case.name in QUICK_NAMES),
}

_PATTERN = re.compile(r"b(\d+)-sq(\d+)-hq(\d+)-skv(\d+)(?:-hkv(\d+))?(?:-page(\d+))?")


def parse(name: str) -> DecodeCase:
    """The case of that name: one of `DECODE`, or any other shape written in the same way.

    >>> parse("b2-sq1-hq16-skv100-page16").max_pages
    7
    """
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(
            f"case {name!r}: expected b<N>-sq<N>-hq<N>-skv<N>[-hkv<N>][-page<N>]; `list` prints the built-in ones"
        )
    b, s_q, h_q, s_kv, h_kv, page_size = (int(text) if text else None for text in match.groups())
    sizes: dict[str, Any] = {
        "b": b,
        "s_q": s_q,
        "h_q": h_q,
        "s_kv": s_kv,
        "h_kv": h_kv or 1,
        "page_size": page_size or 64,
    }
    case = DecodeCase(**sizes)
    if min(case.b, case.s_q, case.h_q, case.s_kv) < 1 or case.h_q % case.h_kv:
        raise BenchError(f"case {name!r}: every size must be at least 1 and h_kv must divide h_q")
    return next((known for known in DECODE if known == case), case)
