"""Bugs planted in the mma.sync kernels."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.attention.runs import SMALL, WIDE, Gpu, decode
from tests.decode.test_small_mutants import alike_where_finite
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

MODES = (("late", 0), ("random", 1))
#: One block works at both requests, each of more tokens than a ring holds. What hides tokens of
#: their last steps: of the first one, queries alone; of the other, the end of the block table, too.
CASE = DecodeCase(b=2, seqlens=(96, 138), s_q=2, h_q=7, page_size=4, missing_pages=1)
#: More steps than are looked up at once.
LONG = DecodeCase(b=1, seqlens=290, h_q=2)
#: Steps that are not whole pages.
PAGES = DecodeCase(b=1, seqlens=100, h_q=2, page_size=24)


def run(gpu: Gpu, mode: tuple[str, int]) -> None:
    """Values that only the last query sees are infinite, and maxima rise."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // CASE.page_size], :, 0]
    page[last % CASE.page_size, 7] = np.inf
    page[last % CASE.page_size - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, gpu[1], *mode):
        got = mla_decode(*inputs.arguments, kernel=gpu[0])
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


def run_plain(gpu: Gpu, case: DecodeCase) -> None:
    decode(make(case), gpu, MODES[0], sm_count=1)


test_small_is_caught, test_small_as_it_is = mutant_suite(
    SMALL[1][0],
    [*(partial(run, SMALL[1], mode) for mode in MODES), partial(run_plain, SMALL[1], PAGES)],
    {
        "bar.sync": (5, [0, 2, 4]),
        "mbarrier.try_wait": (2, [0, 1]),
        "cp.async.mbarrier": (2, [0]),
    },
    [
        Mutant("output not rescaled", "attention_mma_small", "softmax.rescales) != 0", "softmax.rescales) == 1"),
    ],
)
test_wide_is_caught, test_wide_as_it_is = mutant_suite(
    WIDE[1][0],
    [*(partial(run, WIDE[1], mode) for mode in MODES), partial(run_plain, WIDE[1], LONG)],
    {
        "bar.sync": (6, [0, 1, 5]),
        "mbarrier.arrive": (4, [0]),
        "cp.async.mbarrier": (2, [0]),
        "mbarrier.test_wait": (6, [0, 3, 5]),
    },
    [
        Mutant(
            "next rows not kept",
            "attention/mma/step_loader.cuh",
            "if (at == kLookUp + 1) keep_rows",
            "if (false) keep_rows",
        ),
    ],
)
