"""Bugs planted in the logits kernels with mma.sync and without tensor cores."""

from __future__ import annotations

from functools import partial

import mla_cupy
from mla_cupy import reference
from tests.support.indexer_cases import LogitsCase, check_logits, logits_inputs
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

MMA, GENERIC = "indexer_logits_mma", "indexer_logits_generic"
#: Two tokens at once.
CASE = LogitsCase(s_q=3, s_kv=40, h=120, seed=3)


def run(kernel: str, mode: tuple[str, int]) -> None:
    inputs = logits_inputs(CASE)
    with simulated(2, (8, 0), *mode):
        got = mla_cupy.indexer_logits(**inputs, kernel=kernel)
    check_logits(got, inputs, reference.indexer_logits(**inputs))


test_is_caught, test_as_it_is = mutant_suite(
    MMA,
    [partial(run, MMA, ("late", 0)), partial(run, MMA, ("random", 1))],
    {
        "bar.sync": (2, [0, 1]),
    },
    [Mutant("negative products count", "indexer_logits_mma", "fmaxf(products[1], 0.f)", "products[1]")],
)
test_generic_is_caught, test_generic_as_it_is = mutant_suite(
    GENERIC, [partial(run, GENERIC, ("late", 0)), partial(run, GENERIC, ("random", 1))], {"bar.sync": (2, [0, 1])}
)
