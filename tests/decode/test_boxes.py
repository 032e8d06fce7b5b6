"""Bugs planted in the seesaw, whose boxes have half the values of some tokens."""

from __future__ import annotations

from functools import partial

import numpy as np

from mla_cupy.simulation import simulated
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.tolerance import check

SEESAW = "decode_sm90_seesaw"
#: An even number of tiles and an odd one; the last tokens are not seen by all rows.
PAGES_OF_16 = DecodeCase(b=2, seqlens=(130, 61), s_q=2, h_q=8, page_size=16, missing_pages=1)
#: In 35 boxes of 8 tokens, three to a page: a lane knows two of them.
PAGES_OF_24 = DecodeCase(b=1, seqlens=275, s_q=2, h_q=4, page_size=24)
#: In boxes of 4 tokens.
PAGES_OF_12 = DecodeCase(b=1, seqlens=70, h_q=8, page_size=12)


def run(kernel: str, case: DecodeCase, mode: tuple[str, int]) -> None:
    inputs = make(case)
    last = case.lengths()[0] - 1  # of the first request: its values are made finite where a query does not see it
    inputs.kv_cache[inputs.block_table[0, last // case.page_size], last % case.page_size, 0, 300] = np.nan
    with simulated(1, mode=mode[0], seed=mode[1]):
        got = mla_decode(*inputs.arguments, kernel=kernel)
    check(got, inputs.exact, inputs.rounded, case.dtype)


test_boxes_is_caught, test_boxes_as_it_is = mutant_suite(
    SEESAW,
    [
        partial(run, SEESAW, PAGES_OF_16, ("late", 0)),
        partial(run, SEESAW, PAGES_OF_12, ("random", 1)),
        partial(run, SEESAW, PAGES_OF_24, ("random", 1)),
    ],
    {
        "bar.sync": (19, [0, 14]),
        "bar.arrive": (5, [0]),
        "mbarrier.try_wait": (11, [0, 5]),
        "mbarrier.arrive": (12, [0]),
        "fence.proxy": (8, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.wait_all": (1, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.commit_group": (7, [0]),
        "wgmma.wait_group": (7, [0]),
    },
    [
        Mutant(
            "a box beside the next one",
            "decode/sm90_seesaw.cu",
            "first / Layout::kRowsInAtom * Layout::kNextRows;",
            "0;",
        ),
    ],
)
