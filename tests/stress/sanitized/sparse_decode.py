"""Sparse decode from FP8 records: both records, one list and two, lengths, sinks, splits that cut lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mla_cupy.kernels.sparse_decode import SPARSE_DECODE
from tests.sparse_decode.runs import CASES, MORE_CASES, SparseDecodeCase, check, fitting
from tests.stress.sanitized import Call
from tests.support.gpu import fetch, upload
from tests.support.kernels import by_name

#: Enough queries for several per block.
MANY = (
    SparseDecodeCase(b=280, h_q=7, topk=70, lengths=True, sink=True),
    SparseDecodeCase(record="v4", b=70, s_q=2, h_q=64, topk=40, extra=33, lengths=True),
)
#: Results that a launch of its own turns back.
TURNED = SparseDecodeCase(record="v4", s_q=2, h_q=9, sink=True, turned=True)


def calls() -> Iterator[Call]:
    """Every kernel with 16-bit matmuls; `sparse_records` covers the FP8 kernel."""
    for kernel in (name for name, each in by_name(SPARSE_DECODE).items() if each.math == "exact"):
        for case in (*CASES, *MORE_CASES, *MANY, TURNED):
            run = partial(check, fitting(case, kernel), upload, fetch, kernel)
            yield Call(f"{kernel} {case}", run, case not in MANY)
