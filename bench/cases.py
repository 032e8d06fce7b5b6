"""The benchmark cases: paged decode shapes, each with what peers were seen to reach and what we aim at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .errors import BenchError

D_QK = 576
D_V = 512


@dataclass(frozen=True)
class DecodeCase:
    """One dense paged decode: every sequence has `s_kv` keys.

    `seen_us` are the microseconds of the peers on one H200 on one day, and `target_us` what we aim at there.
    They are for orientation: a claim is always a ratio of two figures of one run.
    """

    b: int
    s_q: int
    h_q: int
    s_kv: int
    h_kv: int = 1
    page_size: int = 64
    seen_us: MappingProxyType[str, float] = field(default=MappingProxyType({}), compare=False)
    target_us: float | None = field(default=None, compare=False)

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

    def shape(self) -> dict[str, int]:
        """The sizes as plain data, for the records."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seen_us", "target_us")}
        return {**sizes, "d_qk": D_QK, "d_v": D_V}


def _row(b: int, s_q: int, h_q: int, s_kv: int, flashmla: float, fa3: float, target: float) -> DecodeCase:
    seen: MappingProxyType[str, float] = MappingProxyType({"flashmla": flashmla, "fa3": fa3})
    return DecodeCase(b, s_q, h_q, s_kv, seen_us=seen, target_us=target)


DECODE: tuple[DecodeCase, ...] = (
    # b, s_q, h_q, s_kv: FlashMLA us, FA3 us, target us
    _row(128, 1, 128, 4096, 254, 269, 235),
    _row(128, 2, 128, 4096, 494, 502, 460),
    _row(64, 1, 128, 16384, 512, 502, 460),
    _row(128, 1, 64, 4096, 164, 170, 148),
    _row(128, 1, 32, 8192, 300, 299, 286),
    _row(128, 1, 16, 8192, 302, 297, 286),
    _row(128, 4, 16, 8192, 303, 302, 288),
    _row(128, 1, 8, 8192, 297, 294, 285),
    _row(32, 1, 16, 8192, 100, 89, 76),
    _row(16, 1, 128, 8192, 82, 80, 66),
    _row(4, 1, 128, 8192, 48, 37, 26),
    _row(1, 1, 128, 1024, 18.6, 16.4, 8),
    _row(1, 1, 128, 8192, 31.7, 24.4, 14),
    _row(1, 1, 128, 131072, 98.9, 92.6, 74),
    _row(1, 1, 16, 1024, 15.8, 13.7, 7),
    _row(1, 1, 16, 8192, 29.5, 19.7, 8),
    _row(1, 1, 16, 131072, 80.7, 60.6, 40),
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
        raise BenchError(f"case {name!r}: expected b<N>-sq<N>-hq<N>-skv<N>[-hkv<N>][-page<N>]; `list` prints the built-in ones")
    b, s_q, h_q, s_kv, h_kv, page_size = (int(text) if text else None for text in match.groups())
    sizes: dict[str, Any] = {"b": b, "s_q": s_q, "h_q": h_q, "s_kv": s_kv, "h_kv": h_kv or 1, "page_size": page_size or 64}
    case = DecodeCase(**sizes)
    if min(case.b, case.s_q, case.h_q, case.s_kv) < 1 or case.h_q % case.h_kv:
        raise BenchError(f"case {name!r}: every size must be at least 1 and h_kv must divide h_q")
    return next((known for known in DECODE if known == case), case)


def select(names: Sequence[str], suite: str) -> tuple[DecodeCase, ...]:
    """The cases asked for by name, or the suite when no name is given; doubles are dropped."""
    cases: Iterable[DecodeCase] = [parse(name) for name in names] if names else SUITES[suite]
    return tuple(dict.fromkeys(cases))
