"""Bugs planted in the logits kernel for Blackwell."""

from __future__ import annotations

from functools import partial

import mla_cupy
from mla_cupy import reference
from tests.support.indexer_cases import LogitsCase, PagedCase, check_logits, logits_inputs, paged_inputs
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

KERNEL = "indexer_logits_sm100"
#: Three blocks of tokens, more tiles than the ring has stages, two chunks of columns, one not full.
CASE = LogitsCase(s_q=17, s_kv=300, h=19, d=32, dtype="uint8", ranges="none")
PAGES = PagedCase(b=2, s_q=2, h=3, seqlens=(90, 140), missing_page=True)


def run(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    paged = isinstance(case, PagedCase)
    name, inputs = "indexer_logits" + "_paged" * paged, paged_inputs(case) if paged else logits_inputs(case)
    with simulated(1, (10, 0), *mode):
        got = getattr(mla_cupy, name)(**inputs, kernel=KERNEL)
    check_logits(got, inputs, getattr(reference, name)(**inputs))


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [
        partial(run, PAGES, ("late", 0)),
        partial(run, CASE, ("late", 0)),
        partial(run, CASE, ("random", 1)),
        partial(run, CASE, ("early", 0)),
    ],
    {
        "bar.sync": (2, [0, 1]),
        "mbarrier.try_wait": (13, [0, 6]),
        "mbarrier.arrive": (6, [0, 3]),
        "fence.mbarrier_init": (1, [0]),
        "tcgen05.commit": (3, [0, 1]),
        "tcgen05.wait::ld": (2, [0, 1]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (3, [1]),
    },
    [Mutant("negative products count", "indexer_logits_sm100", "fmaxf(x[i + j], 0.f)", "x[i + j]")],
)
