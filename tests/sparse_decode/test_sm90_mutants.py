"""Bugs planted in Hopper's kernels for sparse decode: each must show, the kernels as they are must not.

As in `tests/decode/test_small_mutants.py`, a mutant is caught by an error of the simulator or by a wrong result, in at
least one mode.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.sparse_decode.runs import SparseDecodeCase, check
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated

STORAGE, CONVERSION, DEQUANT, SCOUTS, MATH = (
    f"attention/sm90/small_records_{part}.cuh" for part in ("storage", "conversion", "dequant", "scouts", "math")
)
KEYS, QUERY = "attention/sm90/record_keys.cuh", "attention/sm90/record_query.cuh"
SOFTMAX = "attention/head_softmax.cuh"
MODES = (("late", 0), ("early", 0), ("random", 1), ("random", 2))
#: One block works on five requests, of one to three tiles.
CASE = SparseDecodeCase(scales="plain", b=5, topk=150, extra=20, lengths=True, h_q=7, sink=True, sm_count=1)

#: The same in a block of 32 heads, which has one math warpgroup and no scouts.
CASE_OF_32 = replace(CASE, h_q=20)

MUTANTS = (
    # Keys
    Mutant("keys released early", "sparse_decode/sm90_small.cu", *steps("wgmma.wait_group", 1, of=4)),
    Mutant("rows not waited for", DEQUANT, "if (C::kStaged) cp_async_wait_group<C::kGroups - 1>();", ""),
    Mutant(
        "keys freed by one warp too few",
        STORAGE,
        "kv_empty[stage]) mbarrier_init(empty, kWarpgroupWarps)",
        "kv_empty[stage]) mbarrier_init(empty, 3)",
    ),
    Mutant("keys announced by seven warps", STORAGE, "mbarrier_init(full, kDequantWarps)", "mbarrier_init(full, 7)"),
    Mutant("later groups not waited for", MATH, "if (i % C::kGroupSwTiles == 0) {", "if (i == 0) {"),
    Mutant("keys do not wait", "sparse_decode/sm90_small.cu", *steps("mbarrier.try_wait", 6, 7, 8, of=10)),
    Mutant(
        "one stage only for the mathematics",
        MATH,
        "math.group = math.stage = group;",
        "math.group = group;\n    math.stage = 0;",
    ),
    Mutant("parity stuck", MATH, "math.ring.full_parity(math.stage);", "0;"),
    Mutant("keys without a proxy fence", "sparse_decode/sm90_small.cu", *steps("fence.proxy.async", 0, 1, 2, of=4)),
    Mutant(
        "keys of another row",
        CONVERSION,
        "scales.of_piece(piece, lane), row, lane)",
        "scales.of_piece(piece, lane), row ^ 1, lane)",
    ),
    Mutant("chunks in the wrong order", KEYS, "lane % kPieceLanes * 2 + half)", "lane % kPieceLanes * 2 + (1 - half))"),
    Mutant("scales of the next group", KEYS, "group = piece / kGroupPieces", "group = (piece + 1) / kGroupPieces % 4"),
    Mutant("scales of the tile before", DEQUANT, "tile.scales = LaneScales<TokenRecord>::load(next, lane);", ""),
    Mutant("halves of RoPE in order", KEYS, "chunk = (half ^ odd_row) * kPieceLanes", "chunk = half * kPieceLanes"),
    Mutant("RoPE in the latents' format", MATH, "(typename C::Rope{}", "(typename C::Latent{}"),
    Mutant("list entries stuck", DEQUANT, "        next = after;\n", ""),
    # Query rows
    Mutant("Q does not wait", "sparse_decode/sm90_small.cu", *steps("mbarrier.try_wait", 4, of=10)),
    Mutant(
        "Q released after the first tile",
        MATH,
        "if (last) release(s.q_empty",
        "if (tile == item.tile_begin) release(s.q_empty",
    ),
    Mutant("Q kept by who has no tile", "sparse_decode/sm90_small.cu", *steps("mbarrier.arrive", 4, of=14)),
    Mutant("the first query twice", SCOUTS, "        current.query = kNoQuery;\n", ""),
    Mutant("the first query of 32 heads twice", DEQUANT, "        current.query = kNoQuery;\n", ""),
    Mutant(
        "Q freed by one warp too few",
        STORAGE,
        "mbarrier_init(empty, C::kMathGroups * kWarpgroupWarps)",
        "mbarrier_init(empty, C::kMathGroups * kWarpgroupWarps - 1)",
    ),
    Mutant("scores in another unit", QUERY, "power_of_two(exponent - 14)", "power_of_two(exponent - 13)"),
    Mutant("scores not scaled back", MATH, "factors.multiply(math.scores);", ";"),
    Mutant("exponents of a lane", QUERY, "__reduce_max_sync(kFullWarp, largest)", "largest"),
    Mutant("RoPE queries in the latents' format", QUERY, "if (i * kSwTilesOfStep >= Tile::kRopeSwTile) continue;", ""),
    # Softmax and results
    Mutant("maxima of the other half's heads", SOFTMAX, "upper ? k + kGiven : k, thread", "k, thread"),
    Mutant("zeros count", MATH, "mask_absent(math.scores, present, thread);", ""),
    Mutant("rows there announced for all", CONVERSION, "[warp] = (u8)rows;", "[warp] = 0xff;"),
    Mutant(
        "P not waited for",
        "sparse_decode/sm90_small.cu",
        *steps("bar.sync", 2, of=8),
    ),
    # The two math warpgroups, and scouts
    Mutant(
        "a part not waited for",
        "sparse_decode/sm90_small.cu",
        *steps("bar.sync", 4, of=8),
    ),
    Mutant("a part overwritten", MATH, "math.group > 0 && last, thread);", "false, thread);"),
    Mutant("a part in another unit", MATH, "ex2_approx(part.max(k) - max)", "1.f"),
    Mutant("a part's sums forgotten", MATH, "__fmul_rn(part.sum(k), theirs.value[k])", "0.f"),
    Mutant("tiles of the other stage", MATH, "C::kMathGroups > 1 ? group ^ stage : 0;", "group;"),
    Mutant(
        "the first warpgroup's sums alone", MATH, "if (math.group == 0 && has_part) add_part", "if (false) add_part"
    ),
    Mutant("scouts do not wait", "sparse_decode/sm90_small.cu", *steps("mbarrier.try_wait", 9, of=10)),
    Mutant("scouts not waited for", "sparse_decode/sm90_small.cu", *steps("mbarrier.try_wait", 3, 5, of=10)),
    Mutant("one scout is enough", STORAGE, "s.rows.empty, kScoutWarps,", "s.rows.empty, 1,"),
    Mutant("scales not copied", SCOUTS, "from.scales + part * kBytes, present)", "from.scales + part * kBytes, false)"),
    Mutant(
        "whole rows' scales of the next group", KEYS, "(row, piece / RowScales", "(row, (piece + 2) % 8 / RowScales"
    ),
    Mutant(
        "scouted rows not waited for",
        "sparse_decode/sm90_small.cu",
        *steps("cp.async.wait_group", 0, of=3),
    ),
    Mutant(
        "scouted rows' groups not waited for", "sparse_decode/sm90_small.cu", *steps("cp.async.wait_group", 1, 2, of=3)
    ),
    Mutant("O carried over", MATH, "        math.reset();\n", "        math.heads.reset();\n"),
)


BLOCKS, TURNS = "attention/sm90/seesaw_records.cuh", "attention/sm90/turns.cuh"
STEPS = "attention/sm90/math.cuh"
#: One block of 64 heads works on six requests, of one to three tiles; a request of two is followed by one of one.
CASE_OF_BLOCKS = SparseDecodeCase(scales="plain", b=6, topk=150, extra=20, lengths=True, h_q=34, sm_count=1)
MUTANTS_OF_BLOCKS = (
    Mutant(
        "left half does not wait",
        "sparse_decode/sm90.cu",
        *steps("mbarrier.try_wait", 13, of=17),
    ),
    Mutant(
        "right half does not wait",
        "sparse_decode/sm90.cu",
        *steps("mbarrier.try_wait", 14, of=17),
    ),
    Mutant(  # other threads have written them; the two others are of P
        "keys without a proxy fence",
        "sparse_decode/sm90.cu",
        *steps("fence.proxy.async", 0, 1, 2, 4, 5, 6, 7, 8, of=10),
    ),
    Mutant("keys announced by three warps", BLOCKS, "init_storage(s, kDequantWarps,", "init_storage(s, 3,"),
    Mutant("scales of the first row", BLOCKS, "scales[r].of_piece", "scales[0].of_piece"),
    Mutant("pieces of the first row", BLOCKS, "load(next[Pieces::row(i)]", "load(next[0]"),
    Mutant("halves split elsewhere", BLOCKS, "kSwTilesLeft = kSwTilesHalf;", "kSwTilesLeft = kSwTilesHalf + 1;"),
    Mutant("odd P over even RoPE columns", BLOCKS, "s.kv[1] + Tile::kRopeSwTile", "s.kv[0] + Tile::kRopeSwTile"),
    Mutant("Q does not wait", "sparse_decode/sm90.cu", *steps("mbarrier.try_wait", 10, 15, of=17)),
    Mutant("Q converted before it is there", "sparse_decode/sm90.cu", *steps("cp.async.wait_all", 0, 1, of=3)),
    Mutant(
        "rows not waited for",
        BLOCKS,
        "mbarrier_wait(e.found_full[warp], dequantiser.ring.full_parity(Queue::kFound));",
        "",
    ),
    Mutant("rows not yet read", "sparse_decode/sm90.cu", *steps("mbarrier.try_wait", 16, of=17)),
    Mutant(
        "scales not waited for",
        "sparse_decode/sm90.cu",
        *steps("cp.async.wait_all", 2, of=3),
    ),
    Mutant("no last tile", BLOCKS, "(last ? FoundTile::kLast : 0), query}", "0, query}"),
    Mutant("stage of the tile before", BLOCKS, "if (found.first()) stage = 0;", ""),
    Mutant("Q after every tile", BLOCKS, ": second;", ": true;"),
    Mutant("rows there announced for all", BLOCKS, "(u16)found.bits", "(u16)0xffff"),
    Mutant("factors of a neighbour", BLOCKS, "s.extra.q_factors[at] = factor;", "s.extra.q_factors[at ^ 1] = factor;"),
    Mutant("scores of blocks not scaled back", STEPS, "        to[0] *= factors[0];\n", ""),
    Mutant("the other P not waited for", "sparse_decode/sm90.cu", *steps("bar.sync", 1, 2, 3, 5, of=6)),
    Mutant("values freed before they are added", "sparse_decode/sm90.cu", *steps("wgmma.wait_group", 4, 8, of=13)),
    Mutant(
        "the last even tile in one half only",
        TURNS,
        "if (tile == item.tile_end) add_other_tile<true>",
        "if (false) add_other_tile<true>",
    ),
    Mutant("list entries stuck", BLOCKS, "place = exists ? Tokens", "place = place < -1 ? Tokens"),
)


@as_verdict
def verdict(mode: tuple[str, int], case: SparseDecodeCase, kernel: str) -> None:
    """What a run shows; empty if nothing."""
    with simulated(1, mode=mode[0], seed=mode[1]):
        check(case, lambda x: x, np.asarray, kernel)


RUNS = {
    "sparse_decode_sm90_small": ((CASE, CASE_OF_32), MUTANTS),
    "sparse_decode_sm90": ((CASE_OF_BLOCKS,), MUTANTS_OF_BLOCKS),
}
PLANTED = [
    pytest.param(kernel, mutant, id=f"{kernel}-{mutant.id}")
    for kernel, (_, mutants) in RUNS.items()
    for mutant in mutants
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "mutant"), PLANTED)
def test_is_caught(kernel: str, mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(mode, case, kernel) for mode, case in product(MODES, RUNS[kernel][0])), (
        f"nothing shows that {mutant.name}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RUNS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernel_as_it_is(mode: tuple[str, int], kernel: str) -> None:
    assert [verdict(mode, case, kernel) for case in RUNS[kernel][0]] == [""] * len(RUNS[kernel][0])
