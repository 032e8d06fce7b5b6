"""Bugs planted in Blackwell's kernels of the sparse backward."""

from __future__ import annotations

from functools import partial

import mla_cupy
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.mutant_suite import Run, mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sparse_cases import SparseCase, make

SUMS, SCORES = "sparse_backward_sm100", "sparse_backward_sm100_ws"
#: Two tiles of keys, the last one short; the heads fill the block.
INPUTS = make(SparseCase(s_q=1, s_kv=150, h_q=64, topk=75, invalid=0.0, sink=True))


def run(kernel: str, mode: tuple[str, int]) -> None:
    with simulated(2, (10, 0), *mode):
        got = flat(mla_cupy.sparse_mla_backward)(*INPUTS.backward_arguments, **INPUTS.options, kernel=kernel)
    check_gradients(got, INPUTS)


def runs(kernel: str) -> list[Run]:
    return [partial(run, kernel, mode) for mode in (("late", 0), ("early", 0), ("random", 1))]


TEXTS = [
    Mutant(
        "dS of the wrong head's delta",
        "sparse_backward_sm100",
        "delta_of[fragment_half(i)]",
        "delta_of[1 - fragment_half(i)]",
    ),
]
TEXTS_OF_SCORES = [
    Mutant(
        "RoPE keys of the other group",
        "sparse_backward_sm100_ws",
        "list[16 * group + 8 * r",
        "list[16 * (1 - group) + 8 * r",
    ),
]

test_is_caught, test_as_it_is = mutant_suite(
    SUMS,
    runs(SUMS),
    {
        "bar.sync": (3, [0, 1]),
        "mbarrier.try_wait": (15, [0, 7]),
        "mbarrier.arrive": (8, [0]),
        "fence.proxy": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.bulk.wait_group": (1, [0]),
        "tcgen05.commit": (12, [0]),
        "tcgen05.wait::ld": (7, [0]),
        "tcgen05.fence::before_thread_sync": (6, [3]),
        "tcgen05.fence::after_thread_sync": (15, [3]),
    },
    TEXTS,
)
test_is_caught_of_scores, test_as_it_is_of_scores = mutant_suite(
    SCORES,
    runs(SCORES),
    {
        "bar.sync": (3, [0, 1]),
        "mbarrier.try_wait": (15, [0, 7]),
        "mbarrier.arrive": (7, [0]),
        "fence.proxy": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.bulk.wait_group": (1, [0]),
        "tcgen05.commit": (13, [0]),
        "tcgen05.wait::ld": (6, [0]),
        "tcgen05.fence::before_thread_sync": (5, [2]),
        "tcgen05.fence::after_thread_sync": (15, [3]),
    },
    TEXTS_OF_SCORES,
)
