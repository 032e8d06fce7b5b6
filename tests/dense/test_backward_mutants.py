"""Bugs planted in the kernel of the gradients of keys and values, and in the statistics before it."""

from __future__ import annotations

from functools import partial
from unittest import mock

from mla_cupy.kernels.dense import backward
from tests.dense.backward_runs import HOPPER, run
from tests.support.dense_cases import DenseCase
from tests.support.dense_gradients import make_gradients
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

SOURCE = "dense_sm90_backward_keys"
ENDS = DenseCase(((3, 5), (4, 4)))
FULL = DenseCase(((130, 128),), causal=False)  # two tiles without a mask
ALONE = DenseCase(((9, 12),), h_q=2, around=(2, 3))


def attempt(case: DenseCase, mode: tuple[str, int]) -> None:
    """The case, as if the L2 were too small for more than two heads."""
    inputs = make_gradients(case)
    with mock.patch.object(backward, "kv_heads_at_once", lambda problem, *_: min(2, problem.h_kv)):
        run(inputs, HOPPER, 1, mode)


TEXTS = [
    Mutant("the rest of dK's product is left out", SOURCE, "if (!first) start_dk<", "if (false) start_dk<"),
]
TEXTS_OF_DELTA = [Mutant("one diagonal of keys", "dense_delta", "first - (end - begin - queries)", "first")]

test_is_caught, test_as_it_is = mutant_suite(
    HOPPER,
    [
        partial(attempt, ENDS, ("late", 0)),
        partial(attempt, FULL, ("late", 0)),
        partial(attempt, FULL, ("early", 0)),
    ],
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (14, [0, 7]),
        "mbarrier.arrive": (16, [0]),
        "fence.proxy": (7, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.bulk.wait_group": (3, [0]),
        "wgmma.fence": (15, [0]),
        "wgmma.wait_group": (11, [0]),
    },
    TEXTS,
)
test_is_caught_of_delta, test_as_it_is_of_delta = mutant_suite(
    "dense_delta", [partial(attempt, ALONE, ("late", 0))], {}, TEXTS_OF_DELTA
)
