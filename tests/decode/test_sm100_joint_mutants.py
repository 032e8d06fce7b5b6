"""Bugs planted in dense decode by pairs of SMs on Blackwell."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.decode.test_small_mutants import alike_where_finite
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

KERNEL = "decode_sm100_joint"
ROLES = "decode/sm100_joint.cuh"
#: One pair works on all requests, of four, no, three and one tiles: two, none, two and one joint tiles. Each block has
#: the rows of one of two queries.
CASE = DecodeCase(b=4, seqlens=(250, 0, 130, 40), s_q=2, h_q=64, page_size=16, missing_pages=1)

TEXTS = [
    Mutant("hidden values not mended", ROLES, "[&] { mend(item, tile); }", "[] {}"),
]


def run(mode: tuple[str, int]) -> None:
    """Values that only the last query sees are infinite, and maxima rise."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, [7, 300]] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, (10, 0), *mode):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, mode) for mode in MODES[1:3]],
    {
        "bar.sync": (3, [0, 1]),
        "barrier.cluster.arrive": (2, [0]),
        "barrier.cluster.wait": (2, [0]),
        "mbarrier.try_wait": (17, [0, 8]),
        "mbarrier.arrive": (8, [0]),
        "fence.proxy": (2, [0]),
        "cp.async.wait_all": (1, [0]),
        "tcgen05.commit": (8, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (3, [1]),
        "tcgen05.fence::after_thread_sync": (11, [2]),
    },
    TEXTS,
)
