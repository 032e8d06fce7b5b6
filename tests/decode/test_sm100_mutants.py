"""Bugs planted in dense decode on Blackwell: each must show, the kernel as it is must not.

A mutant is caught by an error of the simulator (a race, poison, a deadlock, a broken rule of the instruction set) or by
a result that is wrong, in at least one mode. Not every mode can see every bug: a read that comes too early is right
as long as the write is early, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.decode.test_small_mutants import alike_where_finite
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.tolerance import check

KERNEL = "decode_sm100"
ROLES = "decode/sm100.cuh"
SOURCE = "decode/sm100.cu"
#: 24 rows in a block of 32, which has two stages of Q; one block works on all four requests, of four, no, two and three
#: tiles.
CASE = DecodeCase(b=4, seqlens=(200, 0, 66, 130), s_q=2, h_q=12, page_size=16, missing_pages=1)

MUTANTS = [
    # Commits
    Mutant("RoPE columns never released", SOURCE, *steps("tcgen05.commit", 0, of=5)),
    Mutant("Q never released", SOURCE, *steps("tcgen05.commit", 1, of=5)),
    Mutant("no commit of S", SOURCE, *steps("tcgen05.commit", 2, of=5)),
    Mutant("values never released", SOURCE, *steps("tcgen05.commit", 3, of=5)),
    Mutant("no commit of O", SOURCE, *steps("tcgen05.commit", 4, of=5)),
    Mutant(
        "S committed before it is issued",
        ROLES,
        "#pragma unroll 1  // a group's products",
        "        tcgen05_commit(s.s_full[stage]);\n#pragma unroll 1  // a group's products",
    ),
    Mutant(
        "O committed before its last product",
        ROLES,
        "            issue_values<C>(",
        "            if (t + 1 == kDimTiles) tcgen05_commit(s.out_done);\n            issue_values<C>(",
    ),
    Mutant(
        "values released before their product",
        ROLES,
        "            issue_values<C>(",
        "            tcgen05_commit(s.kv_empty[stage][C::kRopeGroups + t]);\n            issue_values<C>(",
    ),
    Mutant(
        "values released one group early",
        ROLES,
        "            tcgen05_commit(s.kv_empty[stage][C::kRopeGroups + t]);",
        "            if (t == 0) tcgen05_commit(s.kv_empty[stage][C::kRopeGroups]);\n"
        "            if (t + 1 < kDimTiles) tcgen05_commit(s.kv_empty[stage][C::kRopeGroups + t + 1]);",
    ),
    Mutant("RoPE columns released with the values", ROLES, "if (group < C::kRopeGroups) tcgen05", "tcgen05"),
    Mutant("Q released after the first tile", ROLES, "        if (last) {\n", "        if (first) {\n"),
    # Waits, in the order of the text. Places 1 to 4 are missing: the simulator takes a commit to pass on what its
    # thread has seen, of which the ISA says nothing.
    Mutant("S not waited for", SOURCE, *steps("mbarrier.try_wait", 0, of=13)),
    Mutant("P overwritten and O re-scaled too early", SOURCE, *steps("mbarrier.try_wait", 5, of=13)),
    Mutant("O stored before it is complete", SOURCE, *steps("mbarrier.try_wait", 6, of=13)),
    Mutant("loads do not wait", SOURCE, *steps("mbarrier.try_wait", 7, of=13)),
    Mutant("Q overwritten too early", SOURCE, *steps("mbarrier.try_wait", 8, of=13)),
    Mutant("Q not waited for", SOURCE, *steps("mbarrier.try_wait", 9, of=13)),
    Mutant("S overwritten too early", SOURCE, *steps("mbarrier.try_wait", 10, of=13)),
    Mutant("keys not waited for", SOURCE, *steps("mbarrier.try_wait", 11, of=13)),
    Mutant("P not waited for", SOURCE, *steps("mbarrier.try_wait", 12, of=13)),
    Mutant("later groups not waited for", ROLES, "tmem_wait(s.kv_full[stage][group]", "tmem_wait(s.kv_full[stage][0]"),
    # Fences
    Mutant("no fence of the barriers' init", SOURCE, *steps("fence.mbarrier_init", 0, of=1)),
    Mutant("P without a proxy fence", SOURCE, *steps("fence.proxy.async", 0, of=2)),
    Mutant("Q without a proxy fence", SOURCE, *steps("fence.proxy.async", 1, of=2)),
    Mutant("Q announced before it is there", SOURCE, *steps("cp.async.wait_all", 0, of=1)),
    Mutant("S used before it is loaded", SOURCE, *steps("tcgen05.wait::ld", 0, of=3)),
    Mutant("O re-scaled before it is loaded", SOURCE, *steps("tcgen05.wait::ld", 1, of=3)),
    Mutant("O stored before it is loaded", SOURCE, *steps("tcgen05.wait::ld", 2, of=3)),
    Mutant("re-scaled O not waited for", SOURCE, *steps("tcgen05.wait::st", 0, of=1)),
    Mutant("S released without a fence", SOURCE, *steps("tcgen05.fence::before_thread_sync", 1, of=4)),
    Mutant("P announced without a fence", SOURCE, *steps("tcgen05.fence::before_thread_sync", 2, of=4)),
    Mutant("S loaded without a fence", SOURCE, *steps("tcgen05.fence::after_thread_sync", 1, of=8)),
    Mutant("O re-scaled without a fence", SOURCE, *steps("tcgen05.fence::after_thread_sync", 2, of=8)),
    Mutant("O loaded without a fence", SOURCE, *steps("tcgen05.fence::after_thread_sync", 3, of=8)),
    Mutant("S multiplied without a fence", SOURCE, *steps("tcgen05.fence::after_thread_sync", 5, 6, of=8)),
    Mutant("O multiplied without a fence", SOURCE, *steps("tcgen05.fence::after_thread_sync", 7, of=8)),
    Mutant("maxima not waited for", SOURCE, *steps("bar.sync", 1, of=5)),
    Mutant("sums not waited for", SOURCE, *steps("bar.sync", 2, of=5)),
    Mutant("factors not waited for", SOURCE, *steps("bar.sync", 3, of=5)),
    Mutant(
        "maxima of two tiles in one place", ROLES, "= s.warp_values[math.parity].maxima;", "= s.warp_values[0].maxima;"
    ),
    # Counts and phases
    Mutant(
        "S freed by one warp too few", ROLES, "s.s_full, s.s_empty, 1, kWarpgroupWarps)", "s.s_full, s.s_empty, 1, 3)"
    ),
    Mutant("P announced by three of four warps", ROLES, "s.p_full, kWarpgroupThreads)", "s.p_full, 96)"),
    Mutant("Q announced by two of three warps", ROLES, "s.q_empty, kQueryThreads, C::k", "s.q_empty, 64, C::k"),
    Mutant("a group counted short", ROLES, "C::group_bytes(group));", "C::group_bytes(group) - 128);"),
    Mutant("parity of P stuck", ROLES, "tmem_wait(s.p_full, parity);", "tmem_wait(s.p_full, 0);"),
    Mutant("parity of O stuck", ROLES, "tmem_wait(s.out_done, math.parity ^ 1);", "tmem_wait(s.out_done, 1);"),
    Mutant("one stage only for the values", ROLES, "        stage = stage + 1 == C::kStages ? 0 : stage + 1;\n", ""),
    Mutant("one stage of Q for the scores", ROLES, "            q_at.advance();\n", ""),
    # Tensor memory
    Mutant("one place for two tiles of S", ROLES, "tmem.lane(stage * kUpperLanes)", "tmem"),
    Mutant("wrong quadrant", ROLES, "tmem.lane(thread / kWarpThreads *", "tmem.lane((thread / kWarpThreads ^ 1) *"),
    Mutant("two tiles of O in one place", ROLES, "kColumnOut + t * C::kBlockRows);", "kColumnOut + t / 2 * 32);"),
    Mutant("O over S", ROLES, "kColumnOut = C::kBlockRows;", "kColumnOut = C::kBlockRows - 16;"),
    Mutant("too few columns", ROLES, "while (columns < used)", "while (2 * columns < used)"),
    Mutant("tensor memory not given back", ROLES, "        tcgen05_dealloc<Map::kAllocated>(tmem);\n", ""),
    Mutant("S added to the last tile's", ROLES, "C::steps_of(sw_tile), i > 0);", "C::steps_of(sw_tile), true);"),
    Mutant("O carried over", ROLES, "                            !first);", "                            true);"),
    Mutant(
        "O of each tile alone", ROLES, "                            !first);", "                            false);"
    ),
    Mutant("O not re-scaled", ROLES, "if (scale.any_but_one()) rescale_out<C>(scale, lanes);", ""),
    Mutant(
        "half of O re-scaled",
        ROLES,
        "i < 2 * kDimTiles; ++i) {\n        const TmemAddr",
        "i < kDimTiles; ++i) {\n        const TmemAddr",
    ),
    Mutant(
        "all lanes issue values",
        ROLES,
        "if (!elect_issuer()) return;\n    Storage<C>& s = block.s;\n    i32 stage",
        "Storage<C>& s = block.s;\n    i32 stage",
    ),
    # Descriptors and places
    Mutant(
        "dims of V at a wrong stride", ROLES, "smem_addr(values), kSw128Bytes)", "smem_addr(values), kSwizzleAtomBytes)"
    ),
    Mutant(
        "V read along its columns",
        ROLES,
        "product_shape<C>(kTileDims, Major::MN)",
        "product_shape<C>(kTileDims, Major::K)",
    ),
    Mutant(
        "keys of P at V's step",
        ROLES,
        "advance(b, step * kKMajorStepBytes), kShape,\n",
        "advance(b, 0), kShape,\n",
    ),
    Mutant(
        "values of the group before",
        ROLES,
        "s.kv[stage] + t * C::kSwTilesPerDimTile",
        "s.kv[stage] + (t ^ 1) * C::kSwTilesPerDimTile",
    ),
    Mutant("Q's columns in another order", ROLES, "s.q[q_at.stage][sw_tile], C::", "s.q[q_at.stage][i], C::"),
    # Masks
    Mutant("no list of absent pages", ROLES, "if (group == C::kRopeGroups) s.present[stage] = present;", ""),
    Mutant("hidden values not sanitized", ROLES, "    sanitize_v<C>(block, s.kv[stage], item, tile, thread);\n", ""),
    Mutant("NaN not given back", ROLES, "if (s.nonfinite_request == item.request)", "if (false)"),
    # Results
    Mutant("sums carried over", ROLES, "        math.heads.reset();\n", ""),
    Mutant(
        "an empty request has what was there",
        ROLES,
        "(x, TmemMap<C>::out(lanes, t), summed)",
        "(x, TmemMap<C>::out(lanes, t), true)",
    ),
    Mutant(
        "maxima of another row", ROLES, "s.stats.max[kth_head(k, thread)] =", "s.stats.max[kth_head(k ^ 1, thread)] ="
    ),
    Mutant("results of the next row", ROLES, "first % kWarpThreads + more);", "(first % kWarpThreads + more) ^ 1);"),
    Mutant(
        "dims of the next warp",
        ROLES,
        "thread / kWarpThreads * kWarpThreads;\n        if (!whole",
        "(thread / kWarpThreads ^ 1) * kWarpThreads;\n        if (!whole",
    ),
    Mutant("rows that are not there stored", ROLES, "if (2 * i + lane / 4 < rows)", "if (true)"),
]


@as_verdict
def verdict(mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(CASE)
    last = CASE.lengths()[0] - 1  # of the first request: only its last query sees it
    page = inputs.kv_cache[inputs.block_table[0, last // 16], :, 0]
    page[last % 16, 7] = np.inf
    page[last % 16 - 1] *= np.asarray(8, page.dtype)  # raises the maxima of the last tile
    with simulated(1, (10, 0), *mode):
        got = mla_decode(*inputs.arguments, kernel=KERNEL)
    alike = [alike_where_finite(mine, exact) for mine, exact in zip(got, inputs.exact, strict=True)]
    check((alike[0], alike[1]), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: Plant) -> None:
    """In one of the modes: late completion shows most."""
    plant(mutant)
    assert any(verdict(mode) for mode in MODES[1:] + MODES[:1]), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernel_as_it_is(mode: tuple[str, int]) -> None:
    assert verdict(mode) == ""
