"""Bugs planted in the sparse forward whose products a pair of SMs makes."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

import mla_cupy
from tests.support.flat import flat
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.tolerance import check, check_lse

KERNEL = "sparse_forward_sm100_joint"
TOPK = 142
"""Two joint tiles of each query: the last one has 14 keys in its first half, and none in its second."""


@cache
def inputs() -> SparseInputs:
    """Two queries, one pair of blocks; maxima grow by more than 2^8 from one joint tile to the next."""
    found = make(SparseCase(s_q=2, s_kv=400, h_q=65, topk=TOPK, invalid=0.0, seed=3))
    rows = np.concatenate(found.rows)
    found.q[...] = np.abs(found.q.astype(np.float32)) / 2
    place = {int(row): i % TOPK // 128 for i, row in reversed(list(enumerate(rows)))}
    for row, tile in place.items():
        found.kv[row, :4] = 64.0 * tile
    return found


def run(mode: tuple[str, int]) -> None:
    case = inputs()
    with simulated(1, (10, 0), *mode):
        got = flat(mla_cupy.sparse_mla_forward)(*case.arguments, **case.options, kernel=KERNEL)
    check(got[:2], case.exact[:2], case.rounded[:2], case.case.dtype)
    check_lse(got[2], case.exact[2], case.rounded[2])


TEXTS = [
    Mutant("never rescaled", "attention/sm100/joint.cuh", "__any_sync(kFullWarp, scale != 1.f)", "false"),
]

test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, ("late", 0)), partial(run, ("early", 0))],
    {
        "bar.sync": (2, [0, 1]),
        "barrier.cluster.arrive": (2, [0]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (13, [0, 6]),
        "mbarrier.arrive": (5, [0]),
        "fence.proxy": (1, [0]),
        "tcgen05.commit": (8, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (11, [2]),
    },
    TEXTS,
)
