"""The cases of the sparse forward from FP8 records: those of the sparse forward, over "v32", or "v4" of 512 columns.

With `fp8_math` they are over "fp8", and our own call has both products in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mla_cupy.cache_formats import FP8, V4, V32, CacheFormat
from mla_cupy.shapes import D_QK

from ...core.cost import D_V, ELEMENT_BYTES, SINGLE_BYTES, Cost
from ...core.errors import BenchError
from ..sparse import cases
from ..sparse.cases import FORM as ROWS_FORM
from ..sparse_forward.cases import CASES as ROWS
from ..sparse_forward.cases import SparseForwardCase

PAGE_SIZE = 64
_MATH_SUFFIX = "-fp8-math"
FORM = f"{ROWS_FORM}[{_MATH_SUFFIX}]"


@dataclass(frozen=True)
class Fp8ForwardCase(SparseForwardCase):
    """Case over records; the peers read 16-bit rows of the same numbers."""

    fp8_math: bool = False

    @property
    def name(self) -> str:
        return super().name + _MATH_SUFFIX * self.fp8_math

    @property
    def record(self) -> CacheFormat:
        if self.fp8_math:
            return FP8
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
        return {**super().shape(), "record": self.record.name, **({"math": "fp8"} if self.fp8_math else {})}


def _of(case: SparseForwardCase) -> Fp8ForwardCase:
    return Fp8ForwardCase(case.s_q, case.s_kv, case.h_q, case.topk, case.d_qk, case.indices)


CASES: tuple[Fp8ForwardCase, ...] = (
    *map(_of, ROWS),
    Fp8ForwardCase(4096, 32768, 128, d_qk=512),
    *(Fp8ForwardCase(4096, s_kv, 128, fp8_math=True) for s_kv in (8192, 32768)),
)
SUITES: Mapping[str, tuple[Fp8ForwardCase, ...]] = {"targets": CASES, "quick": (CASES[0], CASES[3])}


def parse(name: str) -> Fp8ForwardCase:
    """The case of that name: one of `CASES`, or any other shape written in the same form."""
    rows = name.removesuffix(_MATH_SUFFIX)
    case = replace(cases.parse(rows, Fp8ForwardCase, ()), fp8_math=rows != name)
    case = next((known for known in CASES if known == case), case)
    if case.fp8_math and case.d_qk != FP8.d_qk:
        raise BenchError(f"case {name!r}: products in FP8 have keys of {FP8.d_qk}")
    if case.s_kv % PAGE_SIZE:
        raise BenchError(f"case {name!r}: skv must be a multiple of {PAGE_SIZE}, the tokens of a page")
    return case
