"""Bugs planted in what masks add to dense attention, and in the kernel that makes them."""

from __future__ import annotations

from functools import partial

from tests.dense import test_mask as masked
from tests.dense.runs import HOPPER
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant

TEXTS = [
    Mutant("the first lane's columns", "dense/mask.cuh", "i32 shift = fragment_column(thread);", "i32 shift = 0;"),
]
TEXTS_OF_INDICES = [
    Mutant("an index of another sequence", "dense_mask", "key >= (u32)keys.count", "key >= 1u << 30"),
]

test_is_caught, test_as_it_is = mutant_suite(
    HOPPER,
    [partial(masked.test_mask, case) for case in (masked.ENDS, masked.LONG)],
    {"mbarrier.try_wait": (29, [0, 28])},
    TEXTS,
)
test_is_caught_of_indices, test_as_it_is_of_indices = mutant_suite(
    "dense_mask",
    [partial(masked.test_mask_of_indices, *masked.SELECTIONS[n], False) for n in (1, 2)],
    {"bar.sync": (5, [1, 2])},
    TEXTS_OF_INDICES,
)
