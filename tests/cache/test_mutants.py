"""Bugs planted in the kernels of the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.cache.runs import CacheCase, SlotsCase, check_append_and_gather, check_slots, check_update
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated


def run(check: Callable[..., None], case: Any, mode: tuple[str, int] = ("late", 0)) -> None:
    with simulated(2, mode=mode[0], seed=mode[1]):
        check(case, lambda x: x, np.asarray)


def run_update(mode: tuple[str, int]) -> None:
    """Run with checks of the order of accesses to global memory, by which threads exchange columns and pages."""
    with simulated(2, mode=mode[0], seed=mode[1]) as target:
        target.race_global = True
        check_update(lambda x: x, np.asarray, (6, 100, 3))


MODES = (("late", 0), ("random", 1), ("early", 0))

test_append_is_caught, test_append_as_it_is = mutant_suite(
    "cache_append",
    [partial(run, check_append_and_gather, CacheCase("v32"))],
    {},
    [Mutant("group of half its size", "cache/append.cuh", "step < p.group_chunks", "step < p.group_chunks / 2")],
)
test_update_is_caught, test_update_as_it_is = mutant_suite(
    "cache_update",
    [partial(run_update, mode) for mode in MODES],
    {
        "bar.sync": (2, [0, 1]),
    },
    [Mutant("tokens are not limited", "cache_update", "last = min(end, p.max_tokens)", "last = end")],
)
test_slots_is_caught, test_slots_as_it_is = mutant_suite(
    "cache_slots",
    [partial(run, check_slots, SlotsCase(b=300), mode) for mode in MODES],
    {
        "bar.sync": (2, [0, 1]),
    },
)
