"""The cases of sparse decode: the next tokens of sequences, each with top-k tokens of a paged FP8 cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_cupy.cache_formats import FORMATS

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError

FORM = "b<N>-sq<N>-hq<N>-topk<N>[-extra<N>][-v4|-v41|-v41-fp4|-fp8][-pool<N>]"
PAGE_SIZE = 64
POOL_TOKENS = 1 << 20  # 688 MB of the larger record: far more than an L2 holds
# Records of the two caches. Cases of V4.1 have a sink, too, as its layers do; of "fp8" both products are in FP8.
KINDS = {
    **{name: (name, name) for name in ("v32", "v4", "v41", "fp8")},
    "v41-fp4": ("v41", "v41-fp4"),
}


@dataclass(frozen=True)
class SparseDecodeCase:
    """`extra` is the top-k in a second cache; each cache has `pool` tokens. `kind` is one of `KINDS`.

    The microseconds are those of the best peer on one H200 on one day, and our target there; for orientation only.
    """

    b: int
    s_q: int
    h_q: int
    topk: int = 2048
    extra: int = 0
    kind: str = "v32"
    pool: int = POOL_TOKENS
    peer_us: float | None = field(default=None, compare=False)
    target_us: float | None = field(default=None, compare=False)

    @property
    def op(self) -> str:
        return "sparse_mla_decode"

    @property
    def seen(self) -> dict[str, float | None]:
        """Microseconds for orientation, by source."""
        return {"best peer": self.peer_us, "target": self.target_us}

    @property
    def name(self) -> str:
        """The canonical name, which `parse` reads; fields at their default are left out, except topk."""
        name = f"b{self.b}-sq{self.s_q}-hq{self.h_q}-topk{self.topk}"
        name += f"-extra{self.extra}" if self.extra else ""
        name += "" if self.kind == "v32" else f"-{self.kind}"
        return name if self.pool == POOL_TOKENS else f"{name}-pool{self.pool}"

    @property
    def record(self) -> str:
        """Record of the first cache."""
        return KINDS[self.kind][0]

    @property
    def extra_record(self) -> str:
        """Record of the second cache."""
        return KINDS[self.kind][1]

    @property
    def math(self) -> str:
        """Arithmetic of our own call, and of the oracle."""
        return "fp8" if self.record == "fp8" else "exact"

    @property
    def has_sink(self) -> bool:
        """True of calls with a sink."""
        return self.record == "v41"

    @property
    def d_qk(self) -> int:
        """Width of a query."""
        return FORMATS[self.record].d_qk

    @property
    def scale(self) -> float:
        return float(self.d_qk**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a selected token."""
        return self.b * self.s_q * (self.topk + self.extra)

    @property
    def cost(self) -> Cost:
        """Every entry of a list is a token of its own: most are, in a pool of this size."""
        rows = self.b * self.s_q * self.h_q
        lists = (self.topk, self.record), (self.extra, self.extra_record)
        records = self.b * self.s_q * sum(entries * FORMATS[record].token_bytes for entries, record in lists)
        return Cost(
            flops=2 * self.pairs * self.h_q * (self.d_qk + D_V),
            nbytes=records + ELEMENT_BYTES * rows * (self.d_qk + D_V) + SINGLE_BYTES * self.pairs,
            l2_bytes=records,
        )

    def shape(self) -> dict[str, Any]:
        """The sizes as plain data, for the records."""
        names = ("b", "s_q", "h_q", "topk", "extra", "record", "pool", "d_qk")
        mixed = {} if self.extra_record == self.record else {"extra_record": self.extra_record}
        mixed |= {"math": self.math} if self.math != "exact" else {}
        return {**{name: getattr(self, name) for name in names}, "d_v": D_V, **mixed}


CASES: tuple[SparseDecodeCase, ...] = (
    # b, s_q, h_q; the peer is FlashMLA, which takes 64 or 128 heads
    SparseDecodeCase(128, 2, 128, peer_us=415, target_us=332),
    SparseDecodeCase(128, 1, 64, peer_us=118, target_us=91),
    SparseDecodeCase(128, 1, 16, peer_us=118, target_us=69),
    SparseDecodeCase(128, 1, 8, peer_us=118, target_us=69),
    SparseDecodeCase(128, 1, 32, peer_us=118),
    SparseDecodeCase(128, 2, 128, 128, 1024, "v4"),
    SparseDecodeCase(128, 1, 64, 128, 1024, "v4"),
    SparseDecodeCase(128, 1, 16, 128, 1024, "v4"),
    SparseDecodeCase(4, 1, 128),
    SparseDecodeCase(1, 1, 64),
    SparseDecodeCase(1, 1, 16),
)
# A window of 128 tokens and 1,024 compressed ones, as V4.1's layers ask for, beside the same of V4.
MIXED = tuple(
    SparseDecodeCase(128, 1, h_q, 128, 1024, kind) for kind in ("v41-fp4", "v41", "v4") for h_q in (64, 16, 128)
)
# Products in FP8, of the shapes whose records are converted above.
CODED = tuple(
    SparseDecodeCase(b, s_q, h_q, kind="fp8")
    for b, s_q, h_q in ((128, 2, 128), (128, 1, 64), (128, 1, 16), (4, 1, 128))
)
SUITES: Mapping[str, tuple[SparseDecodeCase, ...]] = {
    "targets": CASES,
    "quick": CASES[:4],
    "mixed": MIXED,
    "fp8": CODED,
}

_PATTERN = re.compile(r"b(\d+)-sq(\d+)-hq(\d+)-topk(\d+)(?:-extra(\d+))?(?:-(v4|v41|v41-fp4|fp8))?(?:-pool(\d+))?")


def parse(name: str) -> SparseDecodeCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    match = _PATTERN.fullmatch(name.strip())
    if not match:
        raise BenchError(f"case {name!r}: expected {FORM}; `list` prints the built-in ones")
    b, s_q, h_q, topk, extra, kind, pool = match.groups()
    sizes = (int(b), int(s_q), int(h_q), int(topk))
    case = SparseDecodeCase(*sizes, int(extra or 0), kind or "v32", int(pool or POOL_TOKENS))
    if case.kind == "fp8" and case.extra:
        raise BenchError(f"case {name!r}: fp8 has one cache")
    if min(*sizes, case.pool) < 1 or case.pool % PAGE_SIZE:
        raise BenchError(f"case {name!r}: every size must be at least 1, and the pool whole pages of {PAGE_SIZE}")
    return next((known for known in CASES if known == case), case)
