"""Bugs planted in dense decode on Blackwell."""

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

KERNEL = "decode_sm100"
ROLES = "decode/sm100.cuh"
#: 24 rows in a block of 32, which has two stages of Q; one block works on all four requests, of four, no, two and three
#: tiles.
CASE = DecodeCase(b=4, seqlens=(200, 0, 66, 130), s_q=2, h_q=12, page_size=16, missing_pages=1)

TEXTS = [
    Mutant("O not re-scaled", ROLES, "if (scale.any_but_one()) rescale_out<C>(scale, lanes);", ""),
    Mutant("hidden values not sanitized", ROLES, "    sanitize_v<C>(block, s.kv[stage], item, tile, thread);\n", ""),
]


def run(mode: tuple[str, int]) -> None:
    """Values that only the last query sees are infinite, and maxima rise."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, 7] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, (10, 0), *mode):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


test_is_caught, test_as_it_is = mutant_suite(
    KERNEL,
    [partial(run, mode) for mode in MODES[1:3]],
    {
        "bar.sync": (5, [0, 2]),
        "mbarrier.try_wait": (13, [0, 6]),
        "mbarrier.arrive": (4, [0]),
        "fence.proxy": (2, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "tcgen05.commit": (5, [0]),
        "tcgen05.wait::ld": (3, [0]),
        "tcgen05.wait::st": (1, [0]),
        "tcgen05.fence::before_thread_sync": (4, [2]),
        "tcgen05.fence::after_thread_sync": (8, [7]),
    },
    TEXTS,
)
