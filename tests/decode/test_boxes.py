"""The seesaw whose boxes have half the values of some tokens: planted bugs of what it does otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from mla_cupy.simulation import simulated
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import Mutant, Plant, as_verdict
from tests.support.tolerance import check

KERNEL = "decode_sm90_seesaw_boxes"
SOURCE, TILE = "decode/sm90_seesaw_boxes.cu", "attention/sm90/tile.cuh"
#: An even number of tiles and an odd one; the last tokens are not seen by all rows.
PAGES_OF_16 = DecodeCase(b=2, seqlens=(130, 61), s_q=2, h_q=8, page_size=16, missing_pages=1)
#: In 35 boxes of 8 tokens, three to a page: a lane knows two of them.
PAGES_OF_24 = DecodeCase(b=1, seqlens=275, s_q=2, h_q=4, page_size=24)
#: In boxes of 4 tokens.
PAGES_OF_12 = DecodeCase(b=1, seqlens=70, h_q=8, page_size=12)


@as_verdict
def verdict(case: DecodeCase) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(case)
    last = case.lengths()[0] - 1  # of the first request: its values are made finite where a query does not see it
    inputs.kv_cache[inputs.block_table[0, last // case.page_size], last % case.page_size, 0, 300] = np.nan
    with simulated(1, mode="random", seed=1):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    check(got, inputs.exact, inputs.rounded, case.dtype)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [PAGES_OF_16, PAGES_OF_24, PAGES_OF_12], ids=lambda case: case.id)
def test_as_it_is(case: DecodeCase) -> None:
    assert verdict(case) == ""


@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        (
            PAGES_OF_16,
            Mutant("a box beside the next one", SOURCE, "first / Layout::kRowsInAtom * Layout::kNextRows;", "0;"),
        ),
        (
            PAGES_OF_16,
            Mutant("finite values elsewhere", TILE, "(u32)(row / kRowsInAtom) * kNextRows", "(u32)(row / 8) * 1024"),
        ),
        (PAGES_OF_12, Mutant("rows of the next 8", SOURCE, "first % Layout::kRowsInAtom * kSw128RowBytes", "0")),
    ],
    ids=str,
)
def test_is_caught(case: DecodeCase, mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert verdict(case), f"nothing shows that {mutant.name}"
