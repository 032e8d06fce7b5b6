"""Bugs planted in dense attention on Hopper, and in the schedule."""

from __future__ import annotations

from functools import partial
from unittest import mock

from mla_cupy.kernels.dense import pipeline
from tests.dense.runs import HOPPER, run
from tests.support.dense_cases import DenseCase, make
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

ENDS = DenseCase(((3, 5), (4, 4)))
LONG = DenseCase(((70, 387),))  # a warpgroup sees a tile less; the last tile is without maxima
HEADS = DenseCase(((3, 5), (4, 4)), h_q=7)  # more than the last group has


def attempt(case: DenseCase, mode: tuple[str, int], infinite: bool = False) -> None:
    """The case, with ends that nobody may follow, and infinite values that the first query does not see.

    As if the L2 were too small for more than two heads.
    """
    inputs = make(case)
    if infinite:
        inputs.v[3, 0, 5] = inputs.v[4, 0, 4] = float("inf")
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        inputs.options[name][-1] += 99
    with mock.patch.object(pipeline, "heads_at_once", return_value=2):
        run(inputs, HOPPER, 1, mode)


TEXTS = [
    Mutant("a key too many", "dense_sm90", "(math.thread, i) >= seen", "(math.thread, i) > seen"),
]
TEXTS_OF_SCHEDULE = [
    Mutant("the diagonal at the top left", "dense_schedule", "keys - all.queries + first : keys", "first : keys"),
    Mutant("each head of the first group", "dense/tiles.cuh", "first_head + within %", "within %"),
]

test_is_caught, test_as_it_is = mutant_suite(
    HOPPER,
    [
        partial(attempt, LONG, ("late", 0)),
        partial(attempt, ENDS, ("late", 0), infinite=True),
        partial(attempt, LONG, ("early", 0)),
    ],
    {
        "fence.proxy": (1, [0]),
        "bar.sync": (8, [0, 4]),
        "bar.arrive": (6, [0]),
        "mbarrier.try_wait": (22, [0, 13]),
        "mbarrier.arrive": (25, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (6, [0]),
        "wgmma.wait_group": (6, [0]),
    },
    TEXTS,
)
test_is_caught_of_schedule, test_as_it_is_of_schedule = mutant_suite(
    "dense_schedule",
    [partial(attempt, HEADS, ("late", 0))],
    {"bar.sync": (11, [0, 2])},
    TEXTS_OF_SCHEDULE,
)
