"""Bugs planted in dense attention by mma.sync."""

from __future__ import annotations

from functools import partial

from tests.dense.runs import MMA, MMA_ON, run
from tests.dense.test_mma_sim import HARD
from tests.support.dense_cases import DenseCase, make
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

ENDS = DenseCase(((3, 5), (4, 4)))
#: Three tiles of the first group.
LONG = DenseCase(((40, 270),))


def attempt(case: DenseCase, mode: tuple[str, int], infinite: bool = False) -> None:
    """The case, with ends that nobody may follow, and infinite values that the first query does not see."""
    inputs = make(case)
    if infinite:
        inputs.v[3, 0, 5] = inputs.v[4, 0, 4] = float("inf")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    run(inputs, MMA, 1, mode, MMA_ON[0])


TEXTS = [
    Mutant("a key too many", MMA, "(lane, j) >= seen", "(lane, j) > seen"),
]

test_is_caught, test_as_it_is = mutant_suite(
    MMA,
    [
        partial(attempt, ENDS, ("late", 0), infinite=True),
        partial(attempt, LONG, ("late", 0)),
        partial(attempt, HARD, ("late", 0)),
    ],
    {
        "bar.sync": (5, [0, 2]),
        "mbarrier.arrive": (4, [0]),
        "cp.async.wait_group": (2, [0]),
        "cp.async.mbarrier": (4, [0]),
        "mbarrier.test_wait": (4, [0, 2]),
    },
    TEXTS,
)
