"""Bugs planted in the logits kernels for Hopper."""

from __future__ import annotations

from functools import partial
from unittest import mock

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.logits import pipeline
from tests.support.indexer_cases import LogitsCase, PagedCase, check_logits, logits_inputs, paged_inputs
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

#: Two blocks of tokens; more tiles than the ring has stages.
CASE = LogitsCase(s_q=9, s_kv=700, h=4, ranges="none")
RANGED = LogitsCase(s_q=9, s_kv=300, h=3, d=32, seed=1)
PAGES = PagedCase(b=1, s_q=2, h=9, seqlens=(800,))
IN_E2M1 = PagedCase(b=1, s_q=2, h=9, seqlens=(128,), e2m1=True)
SEQUENCES = PagedCase(b=40, h=2, seqlens=(70, 0, 1, 64, 2) * 8)


def run(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    paged = isinstance(case, PagedCase)
    name, inputs = "indexer_logits" + "_paged" * paged, paged_inputs(case) if paged else logits_inputs(case)
    with simulated(3 if case is RANGED else 1, (9, 0), *mode):
        got = getattr(mla_cupy, name)(**inputs)
    check_logits(got, inputs, getattr(reference, name)(**inputs))


def run_scheduled(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    """Run in shares of a schedule."""
    with mock.patch.object(pipeline, "scheduled", return_value=True):
        run(case, mode)


test_is_caught, test_as_it_is = mutant_suite(
    "indexer_logits_sm90",
    [
        partial(run, RANGED, ("late", 0)),
        partial(run, CASE, ("late", 0)),
        partial(run, CASE, ("random", 1)),
        partial(run, CASE, ("early", 0)),
    ],
    {
        "bar.sync": (3, [0]),
        "mbarrier.try_wait": (4, [0, 2]),
        "mbarrier.arrive": (5, [0, 2]),
        "fence.proxy": (1, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (1, [0]),
        "wgmma.commit_group": (1, [0]),
        "wgmma.wait_group": (1, [0]),
    },
    [Mutant("a range has one key more", "indexer/key_ranges.cuh", "key < end", "key <= end")],
)
test_paged_is_caught, test_paged_as_it_is = mutant_suite(
    "indexer_logits_sm90_paged",
    [
        partial(run, PAGES, ("late", 0)),
        partial(run, IN_E2M1, ("late", 0)),
        partial(run, SEQUENCES, ("late", 0)),
        partial(run, SEQUENCES, ("random", 1)),
    ],
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (5, [0, 2]),
        "mbarrier.arrive": (6, [0, 3]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.mbarrier": (2, [0, 1]),
        "wgmma.fence": (2, [0]),
        "wgmma.commit_group": (2, [0]),
        "wgmma.wait_group": (2, [0, 1]),
    },
    [Mutant("the other key's scale", "indexer_logits_sm90_paged", "own.row == first ?", "own.row != first ?")],
)
test_schedule_is_caught, test_schedule_as_it_is = mutant_suite(
    "indexer_logits_schedule",
    [partial(run_scheduled, RANGED, ("late", 0)), partial(run_scheduled, SEQUENCES, ("late", 0))],
    {"bar.sync": (2, [0, 1])},
)
