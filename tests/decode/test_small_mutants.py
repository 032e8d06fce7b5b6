"""Bugs planted in the decode kernel for few rows: each must show, the kernel as it is must not.

A mutant is caught by an error of the simulator (a race, poison, a deadlock, a broken rule of the instruction set) or by
a result that is wrong, in at least one mode. Not every mode can see every bug: a read that comes too early is right
as long as the write is early, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

Array = npt.NDArray[Any]

KERNEL = "decode_sm90_small"
SMALL = "decode/sm90_small.cuh"
KERNEL_FILE = "decode/sm90_small_block.cuh"
SOURCE = "decode/sm90_small.cu"
LOAD = "decode/sm90_load.cuh"
TILE = "decode/swapped_tile.cuh"
SWAPPED = "attention/sm90/swapped.cuh"
RESULTS = "attention/head_results.cuh"
NONFINITE = "attention/sm90/nonfinite_values.cuh"
HEADS = "attention/head_softmax.cuh"
MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2))
#: 24 rows in a block of 24; one block works on all three requests, of four, two and three tiles.
CASE = DecodeCase(b=3, seqlens=(200, 66, 130), s_q=2, h_q=12, page_size=16, missing_pages=1)

MUTANTS = [
    # Keys
    Mutant(
        "keys released before they are multiplied",
        SMALL,
        "    add_values(Element{}, math.out,",
        "    release(s.kv_empty[math.stage], thread);\n    add_values(Element{}, math.out,",
    ),
    Mutant("keys freed by one warp too few", SMALL, "s.kv_empty[stage], kWarpgroupWarps)", "s.kv_empty[stage], 3)"),
    Mutant("later groups not waited for", SMALL, "if (i % C::kGroupSwTiles == 0)", "if (i == 0)"),
    Mutant("loads do not wait", SOURCE, *steps("mbarrier.try_wait", 4, of=6)),
    Mutant("a group counted short", SMALL, "(full, C::kGroupBytes)", "(full, C::kGroupBytes - kSw128Bytes)"),
    Mutant("one stage only for the mathematics", SMALL, "math.stage = C::next_stage(math.stage);", ""),
    Mutant("parity stuck", SMALL, "math.ring.full_parity(math.stage);", "0;"),
    Mutant(
        "boxes of the next row of boxes", LOAD, "box(i) * rows * kSw128RowBytes", "(box(i) ^ 1) * rows * kSw128RowBytes"
    ),
    Mutant("SW128 tiles from one column block", LOAD, "sw_tile * kSw128Columns, window", "0, window"),
    Mutant("another order than the mathematics'", SMALL, "(i32 i) { return i; }", "(i32 i) { return 8 - i; }"),
    Mutant("no fence of the barriers' init", SOURCE, *steps("fence.mbarrier_init", 0, of=1)),
    # Query rows
    Mutant(
        "Q not waited for",
        SOURCE,
        *steps("mbarrier.try_wait", 0, of=6),
    ),
    Mutant("Q released after the first tile", SMALL, "if (tile + 1 == item.tile_end)", "if (tile == item.tile_begin)"),
    Mutant("one stage of Q for the mathematics", SMALL, "math.q_stage ^= 1;", ""),
    Mutant("Q announced by two of three warps", SMALL, "s.q_full[stage], kQueryThreads)", "s.q_full[stage], 64)"),
    Mutant(
        "Q without a proxy fence",
        SOURCE,
        *steps("fence.proxy.async", 1, of=2),
    ),
    Mutant("Q announced before it is there", SOURCE, *steps("cp.async.wait_all", 0, of=1)),
    Mutant("stages of Q one tile apart", LOAD, "stage * Tile::kSwTilesQk * kRows", "stage * kRows"),
    Mutant("query rows of the next warp", LOAD, "first_row + lane * kQueryWarps", "first_row + 1 + lane * kQueryWarps"),
    # Softmax
    Mutant(
        "maxima not waited for",
        SOURCE,
        *steps("bar.sync", 1, of=6),
    ),
    Mutant("O not re-scaled", SWAPPED, "for (auto& columns : math.out) scale.multiply(columns);", ";"),
    Mutant("scores added to the last tile's", SMALL, "i > 0);", "true);"),
    Mutant("absent pages count", HEADS, "((mask.present >> key) & 1)", "true"),
    Mutant("no list of absent pages", SMALL, "            s.present[stage] = present;\n", ""),
    Mutant("one token too many", TILE, "min(visible, item.tokens) - tile", "min(visible, item.tokens) + 1 - tile"),
    Mutant("the mask of another head", HEADS, "mask.visible[head_number(i)]", "mask.visible[0]"),
    # P
    Mutant("P without a proxy fence", SOURCE, *steps("fence.proxy.async", 0, of=2)),
    Mutant("P not waited for", SOURCE, *steps("bar.sync", 2, of=6)),
    Mutant(
        "swizzle of P forgotten",
        RESULTS,
        "sw128_offset(4 * i + head, chunk)",
        "(u32)((4 * i + head) * 128 + chunk * 16)",
    ),
    Mutant("keys of P swapped", RESULTS, "* 2 + lane / 8 % 2;", "* 2 + 1 - lane / 8 % 2;"),
    Mutant("heads of P swapped", RESULTS, "head = lane / 16 * 8", "head = (1 - lane / 16) * 8"),
    Mutant(
        "the last eight heads of P elsewhere", RESULTS, "sw128_offset(4 * (kWords - 2)", "sw128_offset(4 * (kWords - 4)"
    ),
    # Values
    Mutant("hidden values not sanitized", SMALL, "sanitize_v<C>(block, s.kv[math.stage], item, tile, thread);", ""),
    Mutant("NaN not given back", KERNEL_FILE, "if (s.nonfinite_request == item.request)", "if (false)"),
    Mutant("NaN given to every row", NONFINITE, "if (row_sees<kTree>(p, item, row, token))", "if (true)"),
    Mutant(
        "values of the wrong SW128 tile",
        SWAPPED,
        "advance(v, sw_tile * kSw128Bytes)",
        "advance(v, (sw_tile ^ 1) * kSw128Bytes)",
    ),
    # Results
    Mutant("O carried over", KERNEL_FILE, "        math.reset();\n", "        math.heads.reset();\n"),
    Mutant(
        "statistics not waited for",
        SOURCE,
        *steps("bar.sync", 3, of=6),
    ),
    Mutant("factors not waited for", SOURCE, *steps("bar.sync", 4, of=6)),
    Mutant("sums of three warps", RESULTS, "warp < kWarpgroupWarps; ++warp) sum +=", "warp < 3; ++warp) sum +="),
    Mutant(
        "maxima of another head", RESULTS, "stats.max[kth_head(k, thread)] =", "stats.max[kth_head(k ^ 1, thread)] ="
    ),
    Mutant(
        "results of the next head",
        RESULTS,
        "__shfl_sync(kFullWarp, my_offset[i / kFragments], head)",
        "__shfl_sync(kFullWarp, my_offset[i / kFragments], head ^ 1)",
    ),
]


def alike_where_finite(got: Array, exact: Array) -> Array:
    """`got` with what is not finite in `exact` taken from there, if the same elements are finite in both.

    An infinite key gives some rows a score of -inf: the oracle's 0 * inf is NaN, the kernel's result is infinite.
    """
    finite = np.isfinite(exact)
    assert (np.isfinite(got.astype(np.float32)) == finite).all()
    return np.where(finite, got, exact).astype(got.dtype)


@as_verdict
def verdict(mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, 7] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, mode=mode[0], seed=mode[1]):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernel_as_it_is(mode: tuple[str, int]) -> None:
    assert verdict(mode) == ""
