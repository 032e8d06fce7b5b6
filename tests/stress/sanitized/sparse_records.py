"""Sparse attention over FP8 records: read as they are, and converted first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.sparse_forward import test_forward_fp8 as fp8
from tests.sparse_forward.test_forward_records import (
    CASES,
    CONVERTED,
    GENERIC,
    GENERIC_CASES,
    HOPPER,
    RecordCase,
    check_all,
    make,
    run,
)
from tests.stress.sanitized import Call
from tests.support.gpu import fetch, upload
from tests.support.sparse_cases import SparseCase

#: Enough queries for several per block.
MANY = (
    RecordCase(SparseCase(s_q=280, s_kv=200, h_q=7, topk=70, lengths=True, sink=True)),
    RecordCase(SparseCase(s_q=140, s_kv=100, h_q=70, topk=70, d_qk=512, dtype="float16"), "v4", page_size=50),
)


def calls() -> Iterator[Call]:
    """The cases of the simulator, and some with more queries."""
    for kernel, cases in ((HOPPER, (*CASES, *MANY)), (GENERIC, GENERIC_CASES)):
        for case in cases:
            yield Call(f"{kernel} {case.id}", partial(compare, case, kernel), case not in MANY)
    for case in CONVERTED:
        yield Call(f"converted {case.id}", partial(compare, case, None))
    for case in (*fp8.CASES, *(replace(case, record="fp8", page_size=5) for case in MANY[:1])):
        yield Call(f"{fp8.KERNEL} {case.id}", partial(fp8.compare, case), case in fp8.CASES)


def compare(case: RecordCase, kernel: str | None) -> None:
    """Without a kernel, the records of these cases are converted first."""
    inputs = make(case)
    out, lse, max_logits = (fetch(x) for x in run(inputs, kernel, upload))
    check_all((out, lse, max_logits), inputs, converted=kernel is None)
