"""Dense decode over 16-bit rows: every kernel with every number of rows, dtype and width of keys that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from tests.decode.test_narrow import FAST_CASES as NARROW_CASES
from tests.stress.sanitized import Call
from tests.support.calls import on_host
from tests.support.cases import DecodeCase, DecodeInputs, make
from tests.support.flat import mla_decode
from tests.support.gpu import run_and_check, uploaded
from tests.support.kernels import DECODE_KERNELS, NARROW_KERNELS, takes
from tests.support.tolerance import check

#: One sequence with a split per tile; and enough sequences that a block has several work items.
ONE = DecodeCase(b=1, seqlens=(400,))
SEVERAL = DecodeCase(b=140, seqlens=(130, 0, 65, 70), page_size=16, missing_pages=1)
SHAPES = ((ONE, True), (SEVERAL, False))
#: A build for each number of rows; what lies between takes the next larger one.
ROWS = ({"h_q": 7}, {"h_q": 16}, {"h_q": 12, "s_q": 2}, {"h_q": 16, "s_q": 2}, {"h_q": 70})


def calls() -> Iterator[Call]:
    """Half of the builds of each width."""
    for shape, one_item in SHAPES:
        for rows in ROWS:
            for width, dtype in ((576, "bfloat16"), (512, "float16")):
                yield from calls_of(replace(shape, **rows, d_qk=width, dtype=dtype), DECODE_KERNELS, one_item)
    for case in NARROW_CASES:
        for kernel in NARROW_KERNELS:
            yield Call(f"{kernel} {case.id}", partial(run_and_check, case, kernel=kernel))


def calls_of(case: DecodeCase, kernels: Iterable[str], one_item: bool) -> Iterator[Call]:
    """Every kernel that takes the case; the oracle computes it once, for the first call that is made."""
    inputs = cache(partial(make, case))
    for kernel in kernels:
        if takes(kernel, case):
            yield Call(f"{kernel} {case.id}", partial(_compare_made, inputs, kernel=kernel), one_item)


def _compare_made(inputs: Callable[[], DecodeInputs], **options: Any) -> None:
    compare(inputs(), **options)


def compare(inputs: DecodeInputs, **options: Any) -> None:
    """One call."""
    got = mla_decode(*uploaded(inputs), **inputs.case.options, **options)
    check(on_host(got), inputs.exact, inputs.rounded, inputs.case.dtype)
