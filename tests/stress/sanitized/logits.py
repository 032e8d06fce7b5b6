"""The indexer's queries and keys, and logits: over contiguous keys and over pages, clean or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.kernels.indexer.logits import LOGITS, LOGITS_PAGED
from tests.indexer.logits.test_logits_sim import HALF_CASES
from tests.indexer.prepare.prepare_cases import arrays, expected
from tests.indexer.prepare.test_prepare_sim import FLAGS
from tests.stress.sanitized import Call
from tests.support.calls import assert_same, on_host
from tests.support.gpu import fetch, upload
from tests.support.indexer_cases import (
    IN_FLOAT16,
    ON_TENSOR_CORES,
    Array,
    LogitsCase,
    PagedCase,
    check_logits,
    logits_inputs,
    paged_inputs,
)
from tests.support.kernels import by_name

CASES = (
    LogitsCase(s_q=1, s_kv=1, h=1, dtype="uint8", ranges="none"),
    LogitsCase(s_q=19, s_kv=390, h=12, dtype="uint8", ranges="causal"),
    LogitsCase(s_q=10, s_kv=260, h=72, dtype="uint8"),
    LogitsCase(s_q=9, s_kv=129, h=24, d=64, dtype="uint8"),
    LogitsCase(s_q=7, s_kv=127, h=3, d=32, dtype="uint8"),
    LogitsCase(s_q=12, s_kv=200, h=5, dtype="bfloat16", scales=False),
    LogitsCase(s_q=9, s_kv=150, h=40, d=64, dtype="bfloat16"),
)
PAGED_CASES = (
    PagedCase(b=1, s_q=1, h=64, seqlens=(1,)),
    PagedCase(b=5, s_q=1, h=64, seqlens=(400, 0, 65, 64, 199)),
    PagedCase(b=3, s_q=2, h=32, seqlens=(100, 2, 129), missing_page=True),
    PagedCase(b=4, s_q=4, h=128, seqlens=(70, 64, 300, 5), per_token=True),
    PagedCase(b=2, s_q=3, h=7, d=64, page_size=32, seqlens=(300, 77)),
)
#: Enough tiles and pages for several per block.
MANY = LogitsCase(s_q=270, s_kv=1300, h=9, dtype="uint8")
#: And more blocks of queries than are counted without a schedule.
LONG = LogitsCase(s_q=1040, s_kv=130, h=1, dtype="uint8")
MANY_PAGED = PagedCase(b=40, s_q=2, h=64, seqlens=tuple(range(0, 1200, 30)))


def calls() -> Iterator[Call]:
    """Every kernel."""
    for name in ("prepare_q", "prepare_k"):
        for number, flags in enumerate(FLAGS):
            yield Call(f"{name} {flags}", partial(prepare, name, (32, 64, 128)[number % 3], flags))
    for case in (*CASES, MANY, LONG):
        for kernel in by_name(LOGITS):
            name = f"{'schedule of ' if case == LONG else ''}{kernel} {case.id}"
            yield Call(name, partial(logits, case, kernel), case in CASES)
    for case in HALF_CASES:
        yield Call(f"float16 {case.id}", partial(half, case))
    for paged in (*PAGED_CASES, MANY_PAGED):
        for kernel in by_name(LOGITS_PAGED):
            yield Call(f"{kernel} {paged.id}", partial(pages, paged, kernel), paged != MANY_PAGED)


def prepare(name: str, d: int, flags: dict[str, Any]) -> None:
    """Vectors that are hard to round."""
    inputs = arrays(name, d, tokens=37, heads=5)
    got = on_host(getattr(mla_cupy, f"indexer_{name}")(**_uploaded(inputs), **flags))
    for x, wanted in zip(got, expected(name, inputs, **flags), strict=True):
        assert_same(x, wanted)


def logits(case: LogitsCase, kernel: str) -> None:
    """Ranges of any numbers."""
    inputs = logits_inputs(case)
    within(mla_cupy.indexer_logits, inputs, reference.indexer_logits(**inputs), kernel)


def half(case: LogitsCase) -> None:
    """Run with sums in float16."""
    inputs = logits_inputs(case)
    got = mla_cupy.indexer_logits(**_uploaded(inputs), accumulate="float16")
    check_logits(fetch(got), inputs, reference.indexer_logits(**inputs), IN_FLOAT16)


def pages(case: PagedCase, kernel: str) -> None:
    """Page ids, and lengths, beyond what there is."""
    inputs = paged_inputs(case)
    within(mla_cupy.indexer_logits_paged, inputs, reference.indexer_logits_paged(**inputs), kernel)


def within(operation: Callable[..., Any], inputs: dict[str, Any], exact: Array, kernel: str) -> None:
    """Write inside a larger array and nowhere else; without `clean`, nothing is written that a query does not see."""
    unseen, keys = np.isneginf(exact), exact.shape[-1]
    for out_dtype, clean in (("float32", True), ("bfloat16", False)):
        memory = upload(np.full((*exact.shape[:-1], keys + 8), 7, dtypes.numpy_dtype(out_dtype)))
        operation(**_uploaded(inputs), clean=clean, logits=memory[..., :keys], kernel=kernel)
        whole = fetch(memory)
        got = whole[..., :keys].copy()
        assert (whole[..., keys:].astype(np.float32) == 7).all()
        if not clean:
            assert (got[unseen].astype(np.float32) == 7).all()
            got[unseen] = -np.inf
        check_logits(got, inputs, exact, ON_TENSOR_CORES)


def _uploaded(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: upload(x) for name, x in inputs.items()}
