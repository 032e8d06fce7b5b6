"""Bugs planted in Hopper's kernels for sparse decode."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.sparse_decode.runs import SparseDecodeCase, check
from tests.support.mutant_suite import Run, mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

SMALL, LARGE = "sparse_decode_sm90_small", "sparse_decode_sm90"
#: One block works on several requests, of one to three tiles.
CASE = SparseDecodeCase(scales="plain", b=3, topk=150, extra=20, lengths=True, h_q=7, sink=True, sm_count=1)
CASE_OF_BLOCKS = SparseDecodeCase(scales="plain", b=4, topk=150, extra=20, lengths=True, h_q=34, sm_count=1)


def run(case: SparseDecodeCase, kernel: str, mode: tuple[str, int]) -> None:
    with simulated(1, mode=mode[0], seed=mode[1]):
        check(case, lambda x: x, np.asarray, kernel)


def runs(case: SparseDecodeCase, kernel: str) -> list[Run]:
    return [partial(run, case, kernel, mode) for mode in (("late", 0), ("early", 0), ("random", 1))]


TEXTS = [
    Mutant("scores not scaled back", "attention/sm90/small_records_math.cuh", "factors.multiply(math.scores);", ";"),
]
TEXTS_OF_BLOCKS = [
    Mutant("scales of the first row", "attention/sm90/seesaw_records.cuh", "scales[r].of_piece", "scales[0].of_piece"),
]

test_is_caught, test_as_it_is = mutant_suite(
    SMALL,
    runs(CASE, SMALL),
    {
        "bar.sync": (8, [0, 4]),
        "mbarrier.try_wait": (10, [0, 5]),
        "mbarrier.arrive": (14, [0]),
        "fence.proxy": (4, [0]),
        "cp.async.wait_group": (3, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
    TEXTS,
)
test_is_caught_of_blocks, test_as_it_is_of_blocks = mutant_suite(
    LARGE,
    runs(CASE_OF_BLOCKS, LARGE),
    {
        "bar.sync": (6, [0, 3]),
        "bar.arrive": (2, [0]),
        "mbarrier.try_wait": (17, [0, 8]),
        "mbarrier.arrive": (17, [0]),
        "fence.proxy": (10, [5]),
        "cp.async.wait_all": (3, [0]),
        "wgmma.fence": (12, [0]),
        "wgmma.wait_group": (13, [0]),
    },
    TEXTS_OF_BLOCKS,
)
