"""The cases of dense decode from FP8 records: those of dense decode, over a cache of "v32"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_cupy.records import V32

from ...core.cost import D_QK, D_V, ELEMENT_BYTES, Cost
from ...core.errors import BenchError
from ..decode import cases as rows
from ..decode.cases import DecodeCase

FORM = "b<N>-sq<N>-hq<N>-skv<N>[-page<N>][-mix<N>]"


@dataclass(frozen=True)
class Fp8DecodeCase(DecodeCase):
    """The same over records; the peers read 16-bit rows of the same numbers."""

    @property
    def cost(self) -> Cost:
        """That of records: peers that read rows move 1.76 times the bytes."""
        tokens = int(self.lengths().sum())
        queries_and_out = self.b * self.s_q * self.h_q * (D_QK + D_V) * ELEMENT_BYTES
        return Cost(super().cost.flops, tokens * V32.token_bytes + queries_and_out)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "record": V32.name}


def _of(case: DecodeCase) -> Fp8DecodeCase:
    return Fp8DecodeCase(**vars(case))


CASES: tuple[Fp8DecodeCase, ...] = (
    *(Fp8DecodeCase(128, 1, h_q, 8192) for h_q in (16, 8, 32)),
    Fp8DecodeCase(128, 2, 16, 8192),
    Fp8DecodeCase(128, 1, 128, 4096),
    Fp8DecodeCase(32, 1, 16, 8192),
    *(Fp8DecodeCase(1, 1, 16, s_kv) for s_kv in (8192, 131072)),
)
SUITES: Mapping[str, tuple[Fp8DecodeCase, ...]] = {"targets": CASES, "quick": CASES[:2]}


def parse(name: str) -> Fp8DecodeCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    case = _of(rows.parse(name))
    if case.h_kv != 1 or case.d_qk != D_QK:
        raise BenchError(f"case {name!r}: records have one KV head, and keys of {D_QK}; expected {FORM}")
    return next((known for known in CASES if known == case), case)
