"""Bugs planted in the selection in one launch."""

from __future__ import annotations

from functools import partial

from tests.indexer.select.select_cases import KERNEL, SelectCase, check
from tests.indexer.select.test_select_sim import LONG, logits_of, select
from tests.support.indexer_cases import PagedCase
from tests.support.mutant_suite import mutant_suite

CASE = SelectCase(PagedCase(b=1, h=2, seqlens=(1100,)), topk=300, levels=40)


def run(case: SelectCase, mode: tuple[str, int]) -> None:
    inputs = case.inputs()
    check(case, inputs, select(case, inputs, mode), logits_of(inputs))


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, CASE, ("late", 0)), partial(run, CASE, ("random", 1)), partial(run, LONG, ("late", 0))],
    {
        "bar.sync": (9, [0, 4]),
        "barrier.cluster.arrive": (1, [0]),
        "barrier.cluster.wait": (1, [0]),
        "mbarrier.try_wait": (4, [0, 2]),
        "mbarrier.arrive": (5, [2]),
        "wgmma.wait_group": (1, [0]),
    },
)
