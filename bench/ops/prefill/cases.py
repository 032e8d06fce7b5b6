"""The cases of un-absorbed prefill."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ...core.cost import ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "b<N>-sq<N>-skv<N>-hq<N>[-hkv<N>][-d<N>x<N>][-full][-state][-topk<N>][-fp8]"
D_ROPE = 64
MLA = 192, 128


@dataclass(frozen=True)
class PrefillCase:
    """`b` sequences of equal lengths; the keys' last 64 columns are shared by all heads.

    Attributes
    ----------
    h_kv : int
        0: as many as query heads.
    causal : bool
        Whether a query is blind to what comes after it.
    state : bool
        Whether an earlier state, in float32, is merged.
    topk : int
        If not 0, each query attends to that many of the keys that it sees, by a mask.
    fp8 : bool
        Whether queries, keys and values are e4m3 codes, without scales.
    peer_us : float, optional
        Of the best peer on one H200 on one day, for orientation only.
    """

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int = 0
    d_qk: int = MLA[0]
    d_v: int = MLA[1]
    causal: bool = True
    state: bool = False
    topk: int = 0
    fp8: bool = False
    peer_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "mla_prefill"

    @property
    def heads_kv(self) -> int:
        return self.h_kv or self.h_q

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head."""
        if not self.causal:
            return self.b * self.s_q * self.s_kv
        longest = self.s_kv
        shortest = longest - self.s_q + 1  # below 1: the first queries see nothing
        first = max(1, shortest)
        return self.b * (longest - first + 1) * (first + longest) // 2

    @property
    def cost(self) -> Cost:
        queries, keys = self.b * self.s_q * self.h_q, self.b * self.s_kv * self.heads_kv
        elements = queries * (self.d_qk + self.d_v) + keys * (self.d_qk - D_ROPE + self.d_v)
        elements += self.b * self.s_kv * D_ROPE
        codes = elements - queries * self.d_v if self.fp8 else 0  # of half the bytes: all but the results
        state = SINGLE_BYTES * queries * (self.d_v + 1) if self.state else 0
        selection = self.b * self.s_q * (SINGLE_BYTES * self.topk + self.s_kv // 8) if self.topk else 0
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + self.d_v),
            nbytes=ELEMENT_BYTES * (elements - codes // 2) + SINGLE_BYTES * queries + state + selection,
        )

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""
        return {"best peer": self.peer_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads; fields at their default are left out."""
        name = f"b{self.b}-sq{self.s_q}-skv{self.s_kv}-hq{self.h_q}"
        if self.h_kv:
            name += f"-hkv{self.h_kv}"
        if (self.d_qk, self.d_v) != MLA:
            name += f"-d{self.d_qk}x{self.d_v}"
        name += ("" if self.causal else "-full") + ("-state" if self.state else "")
        return name + (f"-topk{self.topk}" if self.topk else "") + ("-fp8" if self.fp8 else "")

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        names = ("b", "s_q", "s_kv", "h_q", "d_qk", "d_v", "causal", "state", "topk", "fp8")
        return {**{name: getattr(self, name) for name in names}, "h_kv": self.heads_kv}


def _causal(b: int, s: int, h: int, peer_us: float | None = None, d_qk: int = MLA[0], d_v: int = MLA[1]) -> PrefillCase:
    return PrefillCase(b, s, s, h, d_qk=d_qk, d_v=d_v, peer_us=peer_us)


CASES = (
    _causal(2, 4096, 128, peer_us=1960),
    _causal(1, 8192, 128, peer_us=3666),
    _causal(1, 16384, 128, peer_us=15764),
    _causal(4, 2048, 128, peer_us=1177),
    _causal(8, 4096, 16, peer_us=1199),
    _causal(1, 16384, 16, peer_us=2020),
    PrefillCase(1, 8192, 8192, 128, causal=False, peer_us=8088),
    _causal(1, 8192, 64, d_qk=256, d_v=256),
    _causal(1, 8192, 32, d_qk=128, d_v=128),
    # A chunk of 2,048 queries: its own keys, and an earlier chunk's
    _causal(1, 2048, 16),
    PrefillCase(1, 2048, 7680, 16, causal=False),
    PrefillCase(1, 2048, 7680, 16, causal=False, state=True),
)
# A prefill of 2,048 selected keys a query: from which lengths on is it faster than sparse attention?
_LENGTHS = {
    16: (16384, 4096, 8192, 32768),
    8: (4096, 8192, 16384, 32768),
    64: (4096, 8192, 16384),
    128: (4096, 8192, 16384),
}
# Queries, keys and values in e4m3, beside the same in 16 bits: `targets` has those.
CODED = (
    PrefillCase(1, 8192, 8192, 128, fp8=True),
    PrefillCase(1, 8192, 8192, 128, causal=False, fp8=True),
    PrefillCase(4, 2048, 2048, 128, fp8=True),
    PrefillCase(8, 4096, 4096, 16, fp8=True),
)
MASKED = tuple(PrefillCase(1, s, s, h, topk=2048) for h, lengths in _LENGTHS.items() for s in lengths)
# Quick: long and short sequences, of many heads and of few.
SUITES: Mapping[str, tuple[PrefillCase, ...]] = {
    "targets": CASES,
    "quick": (CASES[1], CASES[3], CASES[4]),
    "masked": MASKED,
    "fp8": CODED,
}

_PATTERN = re.compile(
    r"b(\d+)-sq(\d+)-skv(\d+)-hq(\d+)(?:-hkv(\d+))?(?:-d(\d+)x(\d+))?(-full)?(-state)?(?:-topk(\d+))?(-fp8)?"
)


AnyCase = TypeVar("AnyCase", bound=PrefillCase)


def parse(name: str) -> PrefillCase:
    """The case of that name: a built-in one, or any other shape written in the same form."""
    return parse_as(name, PrefillCase, CASES)


def parse_as(name: str, kind: type[AnyCase], built_in: Sequence[AnyCase]) -> AnyCase:
    """`parse` of any kind of case."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    b, s_q, s_kv, h_q, h_kv, d_qk, d_v, full, state, topk, fp8 = match.groups()
    sizes = [int(size) for size in (b, s_q, s_kv, h_q)]
    heads = int(h_kv) if h_kv else 0
    if min(sizes) < 1 or (h_kv and (heads < 1 or sizes[3] % heads)):
        raise BenchError(f"case {name!r}: every size must be at least 1, and hq a multiple of hkv")
    widths = (int(d_qk), int(d_v)) if d_qk else MLA
    b_, s_q_, s_kv_, h_q_ = sizes
    selected = int(topk or 0)
    more = partial(kind, causal=not full, state=bool(state), topk=selected, fp8=bool(fp8))
    case = more(b_, s_q_, s_kv_, h_q_, heads, *widths)
    return next((known for known in built_in if known == case), case)
