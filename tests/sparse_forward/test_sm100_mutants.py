"""Bugs planted in Blackwell's kernel of the sparse forward."""

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

KERNEL = "sparse_forward_sm100"


@cache
def inputs() -> SparseInputs:
    """Two queries of four tiles for one block; maxima grow by more than 2^8 from tile to tile."""
    inputs = make(SparseCase(s_q=2, s_kv=300, h_q=15, topk=197, invalid=0.0, seed=3))
    rows = np.concatenate(inputs.rows)
    inputs.q[...] = np.abs(inputs.q.astype(np.float32)) / 2
    place = {int(row): i % 197 // 64 for i, row in reversed(list(enumerate(rows)))}
    for row, tile in place.items():
        inputs.kv[row, :4] = 64.0 * tile
    return inputs


def run(mode: tuple[str, int]) -> None:
    case = inputs()
    with simulated(1, (10, 0), *mode):
        got = flat(mla_cupy.sparse_mla_forward)(*case.arguments, **case.options, kernel=KERNEL)
    check(got[:2], case.exact[:2], case.rounded[:2], case.case.dtype)
    check_lse(got[2], case.exact[2], case.rounded[2])


TEXTS = [
    Mutant("never rescaled", "attention/sm100/swapped.cuh", "scale.any_but_one() && !first", "false"),
]

test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, mode) for mode in (("late", 0), ("early", 0), ("random", 1))],
    {
        "bar.sync": (7, [0, 3]),
        "mbarrier.try_wait": (9, [0, 4]),
        "mbarrier.arrive": (3, [0]),
        "fence.proxy": (1, [0]),
        "fence.mbarrier_init": (1, [0]),
        "tcgen05.commit": (8, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (8, [2]),
    },
    TEXTS,
)
