"""The cases of the sparse forward from FP8 records: those of the sparse forward, over "v32", or "v4" of 512 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_cupy.cache_formats import V4, V32, CacheFormat
from mla_cupy.shapes import D_QK

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError
from ..sparse import cases
from ..sparse_forward.cases import CASES as ROWS
from ..sparse_forward.cases import SparseForwardCase

PAGE_SIZE = 64


class Fp8ForwardCase(SparseForwardCase):
    """Case over records; the peers read 16-bit rows of the same numbers."""

    @property
    def record(self) -> CacheFormat:
        return V32 if self.d_qk == D_QK else V4

    @property
    def cost(self) -> Cost:
        """Cost of records: peers that read rows move 1.76 times the bytes."""
        rows = self.s_q * self.h_q
        nbytes = self.record.token_bytes
        queries_and_out = ELEMENT_BYTES * rows * (self.d_qk + D_V)
        return Cost(
            flops=super().cost.flops,
            nbytes=self.s_kv * nbytes + queries_and_out + SINGLE_BYTES * self.pairs,
            l2_bytes=self.pairs * nbytes,
        )

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "record": self.record.name}


def _of(case: SparseForwardCase) -> Fp8ForwardCase:
    return Fp8ForwardCase(case.s_q, case.s_kv, case.h_q, case.topk, case.d_qk, case.indices)


CASES: tuple[Fp8ForwardCase, ...] = (*map(_of, ROWS), Fp8ForwardCase(4096, 32768, 128, d_qk=512))
SUITES: Mapping[str, tuple[Fp8ForwardCase, ...]] = {"targets": CASES, "quick": (CASES[0], CASES[3])}


def parse(name: str) -> Fp8ForwardCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    case = cases.parse(name, Fp8ForwardCase, CASES)
    if case.s_kv % PAGE_SIZE:
        raise BenchError(f"case {name!r}: skv must be a multiple of {PAGE_SIZE}, the tokens of a page")
    return case
