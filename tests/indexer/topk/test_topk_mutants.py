"""Bugs planted in the top-k."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.indexer.topk.test_topk_sim import BLOCK, CLUSTER, WIDTHS, Array, select
from tests.indexer.topk.topk_cases import assert_selected, expected, hard_rows
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

SOURCE = "indexer_topk_select"
ROWS, WIDE_ROWS = hard_rows(WIDTHS[BLOCK]), hard_rows(WIDTHS[CLUSTER])
MIXED = np.where(np.arange(WIDTHS[CLUSTER]) % 3, WIDE_ROWS[2:3], WIDE_ROWS[:1])


def run(blocks: int, logits: Array, **options: Any) -> None:
    assert_selected(select(blocks, logits, k=300, **options), expected(logits, k=300, **options))


test_is_caught, test_as_it_is = mutant_suite(
    SOURCE,
    [partial(run, BLOCK, ROWS[[2]]), partial(run, BLOCK, ROWS[[5]], order="value")],
    {
        "bar.sync": (13, [0, 6]),
    },
    [Mutant("ties are all taken", SOURCE, "first_bits(word.equal(), threshold.rank - before.equal)", "word.equal()")],
)
test_cluster_is_caught, test_cluster_as_it_is = mutant_suite(
    SOURCE,
    [partial(run, CLUSTER, MIXED)],
    {
        "bar.sync": (14, [0, 7]),
        "barrier.cluster.arrive": (2, [0, 1]),
        "barrier.cluster.wait": (2, [0, 1]),
        "mbarrier.try_wait": (2, [0, 1]),
        "mbarrier.arrive": (2, [0]),
    },
    [
        Mutant(
            "every block takes the ties", SOURCE, "Before{t.above_before, t.equal_before}", "Before{t.above_before, 0}"
        )
    ],
)
