"""Bugs are planted where they should be, or the test says why not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mla_cupy
from tests.support.mutant_suite import Step, shows, without
from tests.support.sim_driver import simulated


def select() -> None:
    """Simulates a selection, and compares it."""
    logits = np.arange(300, dtype=np.float32)[None]
    with simulated(1):
        indices, *_ = mla_cupy.indexer_topk(logits, 3, kernel="indexer_topk_select")
    assert sorted(indices[0].tolist()) == [297, 298, 299]


def test_a_step_that_is_left_out_shows() -> None:
    select()
    with without(Step("indexer_topk_select", "bar.sync", 1, of=13)):
        assert shows([select])
    select()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step("indexer_topk_select", "bar.sync", 0, of=99), r"indexer_topk_select has 13 steps bar.sync, not 99"),
        (Step("merge_states", "bar.sync", 0, of=1), "no run has loaded merge_states"),
    ],
    ids=["count", "kernel"],
)
def test_what_is_planted_nowhere_is_told(step: Step, message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message), without(step):
        partial(select)()
