"""Bugs planted in the Blackwell kernels of the sparse backward: each must show, the kernels as they are must not.

A mutant is caught by an error of the simulator (a race, poison, a deadlock, a broken rule of the instruction set) or by
a gradient that is wrong, in at least one mode. Not every mode can see every bug: a read that comes too early is correct
as long as the write is early, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import mla_cupy
from tests.support import mutants
from tests.support.flat import flat
from tests.support.gradients import check_gradients
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, lower_scores, make

ROLES = "sparse_backward/sm100.cuh"
SUMS = "sparse_backward/sm100.cu"
SCORES = "sparse_backward/sm100_ws.cu"
#: Three tiles of keys, the last one short; the heads fill the block.
CASE = SparseCase(s_q=1, s_kv=150, h_q=64, topk=75, invalid=0.0, sink=True)
#: The same, so that some gradients are not lost beside the others where the scores are low.
LOW_CASE = replace(CASE, s_q=2)
KERNELS_OF = {SUMS: ("sparse_backward_sm100",), SCORES: ("sparse_backward_sm100_ws",)}


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """`kernel` runs; with `low_scores` what is behind a list's end would outweigh it."""

    kernel: str = "sparse_backward_sm100"
    low_scores: bool = False

    @property
    def id(self) -> str:
        return f"{self.kernel.removeprefix('sparse_backward_')}-{self.name.replace(' ', '_')}"


WS = "sparse_backward_sm100_ws"
MUTANTS = [
    # Commits
    Mutant("no commit of S", SUMS, *mutants.steps("tcgen05.commit", 0, 9, of=12)),
    Mutant(
        "S committed before it is issued",
        ROLES,
        "    Plan::issue_s(s, tmem, stage, [&]",
        "    tcgen05_commit(s.s_full);\n    Plan::issue_s(s, tmem, stage, [&]",
    ),
    Mutant("dS not waited for", SUMS, *mutants.steps("mbarrier.try_wait", 11, of=15)),
    Mutant(
        "dP committed before it is issued",
        ROLES,
        "Plan::issue_dp(s, tmem, stage);\n    tcgen05_commit(s.dp_full);",
        "tcgen05_commit(s.dp_full);\n    Plan::issue_dp(s, tmem, stage);",
    ),
    Mutant(
        "dKV committed before its last product",
        ROLES,
        "Plan::issue_dk(s, tmem, t, head_steps);\n            tcgen05_commit(s.dkv_full[t]);",
        "tcgen05_commit(s.dkv_full[t]);\n            Plan::issue_dk(s, tmem, t, head_steps);",
    ),
    Mutant("no commit of the RoPE dims", SUMS, *mutants.steps("tcgen05.commit", 8, of=12)),
    Mutant(
        "dQ committed before the last tile",
        ROLES,
        "    for (i32 tile = 0; tile < item.tiles; ++tile) {\n"
        "        const u32 parity = tile & 1;\n        tmem_wait(s.p_full, parity);",
        "    for (i32 tile = 0; tile < item.tiles; ++tile) {\n        const u32 parity = tile & 1;\n"
        "        if (tile + 1 == item.tiles) tcgen05_commit(s.dq_full);\n        tmem_wait(s.p_full, parity);",
    ),
    # Tensor memory
    Mutant(
        "wrong quadrant of S",
        SUMS,
        "return thread / kWarpThreads * kWarpThreads;",
        "return (thread / kWarpThreads ^ 1) * kWarpThreads;",
    ),
    Mutant("all warps read quadrant 0 of dKV", SUMS, "dkv(tmem, t).lane(warp * kWarpThreads)", "dkv(tmem, t)"),
    Mutant(
        "swapped halves of S and dP",
        SUMS,
        "tcgen05_ld_16x256b(x, tmem.lane(lanes_of_warp(thread)).column(kColumnScores));",
        "tcgen05_ld_16x256b(x, tmem.lane(lanes_of_warp(thread) + kUpperLanes).column(kColumnScores));",
    ),
    Mutant(
        "dP over S",
        SUMS,
        "issue_scores<kSwTilesV>(tmem.lane(kUpperLanes).column(kColumnScores)",
        "issue_scores<kSwTilesV>(tmem.column(kColumnScores)",
    ),
    Mutant(
        "RoPE sums in the same half",
        SUMS,
        "return tmem.lane(kUpperLanes).column(kColumnRope);",
        "return tmem.column(kColumnRope);",
    ),
    Mutant(
        "two tiles of dKV in one place",
        SUMS,
        "tmem.column(kColumnDkv + t * kTileKeys)",
        "tmem.column(kColumnDkv + t / 2 * kTileKeys)",
    ),
    Mutant(
        "dQ begins on the last column of dKV",
        SUMS,
        "tmem.column(kColumnDq + t * kBlockHeads)",
        "tmem.column(kColumnDq - 16 + t * kBlockHeads)",
    ),
    Mutant("dQ overwritten by each tile", ROLES, "stage, tile > 0,", "stage, false,"),
    Mutant("dQ adds to what it finds", ROLES, "stage, tile > 0,", "stage, true,"),
    Mutant("dK overwrites dV", SUMS, "s.ds, head_steps, true);", "s.ds, head_steps, false);"),
    Mutant(
        "no after_thread_sync",
        SUMS,
        *mutants.steps("tcgen05.fence::after_thread_sync", *range(1, 14), of=15),
    ),
    Mutant(
        "no before_thread_sync of the epilogue",
        SUMS,
        *mutants.steps("tcgen05.fence::before_thread_sync", 2, 3, 4, of=6),
    ),
    Mutant(
        "no before_thread_sync of the softmax",
        SUMS,
        *mutants.steps("tcgen05.fence::before_thread_sync", 1, of=6),
    ),
    Mutant(
        "dKV released before it is loaded",
        SUMS,
        "            tcgen05_wait_ld();\n            pin_loaded(x[0]);\n            pin_loaded(x[1]);\n"
        "            loaded();\n",
        "            loaded();\n            tcgen05_wait_ld();\n            pin_loaded(x[0]);\n"
        "            pin_loaded(x[1]);\n",
    ),
    Mutant(
        "S used before it is loaded",
        SUMS,
        *mutants.steps("tcgen05.wait::ld", 0, of=7),
    ),
    Mutant("tensor memory not given back", ROLES, "tcgen05_dealloc<kTmemColumns>(tmem);", ""),
    Mutant("half of the columns allocated", "common/limits.cuh", "kTmemColumns = 512", "kTmemColumns = 256"),
    # Shared memory
    Mutant(
        "K released one tile early",
        ROLES,
        "        Plan::issue_dq(s, tmem, stage, tile > 0, "
        "[&](i32 group) { tcgen05_commit(s.k_empty[stage][group]); });",
        "        for (i32 group = 0; group < C::kGroups; ++group) tcgen05_commit(s.k_empty[stage][group]);\n"
        "        Plan::issue_dq(s, tmem, stage, tile > 0, [&](i32 group) {});",
    ),
    Mutant(
        "SW128 tiles of K released one pair early",
        SUMS,
        "done(t);",
        "if (t == 0) done(0);\n            if (t + 1 < kDimTiles) done(t + 1);",
    ),
    Mutant("RoPE tile of K never released", SUMS, "done(kRopeGroup);", ""),
    Mutant(
        "later tiles of K not waited for",
        ROLES,
        "if (sw_tile % kGroupSwTiles == 0) tmem_wait",
        "if (sw_tile == 0) tmem_wait",
    ),
    Mutant("gather does not wait", SUMS, *mutants.steps("mbarrier.try_wait", 14, of=15)),
    Mutant(
        "K counted without one SW128 tile",
        ROLES,
        "mbarrier_arrive_expect_tx(full, sw_tiles * kKeySwTileBytes);",
        "mbarrier_arrive_expect_tx(full, kKeySwTileBytes);",
    ),
    Mutant(
        "gathered rows of the next lane",
        ROLES,
        "sw_tile * kKeySwTileBytes + lane * kGatherBytes",
        "sw_tile * kKeySwTileBytes + (lane ^ 1) * kGatherBytes",
    ),
    Mutant(
        "P without a proxy fence",
        SUMS,
        *mutants.steps("fence.proxy.async", 1, of=4),
    ),
    Mutant(
        "dS without a proxy fence",
        SUMS,
        *mutants.steps("fence.proxy.async", 2, of=4),
    ),
    Mutant("P not waited for", SUMS, *mutants.steps("mbarrier.try_wait", 9, of=15)),
    Mutant("parity of P stuck", ROLES, "tmem_wait(s.p_full, parity);", "tmem_wait(s.p_full, 0);"),
    Mutant("Q not waited for", SUMS, *mutants.steps("mbarrier.try_wait", 7, of=15)),
    Mutant("dQ over Q before the last product", ROLES, "tmem_wait(s.dq_full, 0);", "tmem_wait(s.rope_full, 0);"),
    Mutant("dQ stored before all have written", SUMS, *mutants.steps("bar.sync", 1, of=3)),
    Mutant(
        "dQ without a proxy fence",
        SUMS,
        *mutants.steps("fence.proxy.async", 3, of=4),
    ),
    Mutant("store of dQ not waited for", SUMS, *mutants.steps("cp.async.bulk.wait_group", 0, of=1)),
    Mutant(
        "P transposed the wrong way",
        SUMS,
        "thread / kWarpThreads * 2 + matrix % 2",
        "thread / kWarpThreads * 2 + matrix / 2",
    ),
    Mutant(
        "P's swizzle forgotten",
        SUMS,
        "stmatrix_x4_trans(smem_addr(sw_tile) + sw128_offset(row, chunk), words);",
        "stmatrix_x4_trans(smem_addr(sw_tile) + row * 128 + chunk * 16, words);",
    ),
    # Descriptors
    Mutant(
        "SW128 tile stride of Q for K",
        SUMS,
        "mn_major_matrix(smem_addr(keys), kKeySwTileBytes)",
        "mn_major_matrix(smem_addr(keys), kSw128Bytes)",
    ),
    Mutant(
        "K-major read of an MN-major operand",
        SUMS,
        "kDims, kTileKeys, Major::MN, Major::K>",
        "kDims, kTileKeys, Major::K, Major::K>",
    ),
    Mutant(
        "N of the other tile size",
        SUMS,
        "kBlockHeads, kTileKeys, Major::K, Major::K>",
        "kBlockHeads, 2 * kTileKeys, Major::K, Major::K>",
    ),
    Mutant(
        "all lanes issue",
        ROLES,
        "    if (!elect_issuer()) return;\n    const i32 head_steps",
        "    const i32 head_steps",
    ),
    # Barriers
    Mutant(
        "dKV freed by one warp too few",
        ROLES,
        "mbarrier_init(barrier, kWarpgroupWarps);",
        "mbarrier_init(barrier, kWarpgroupWarps - 1);",
    ),
    Mutant("RoPE freed by one group", ROLES, "kEpilogueGroups * kWarpgroupWarps", "kWarpgroupWarps"),
    Mutant("no fence of the barriers' init", SUMS, *mutants.steps("fence.mbarrier_init", 0, of=1)),
    Mutant("dKV of the last tile not waited for", SUMS, *mutants.steps("mbarrier.try_wait", 10, of=15)),
    Mutant(
        "epilogue one phase behind",
        ROLES,
        "tmem_wait(s.dkv_full[t], tile & 1);",
        "tmem_wait(s.dkv_full[t], 1);",
    ),
    # Numbers
    Mutant(
        "keys behind the end count",
        SUMS,
        "return fragment_column(thread, i);",
        "return -1;",
        low_scores=True,
    ),
    Mutant("dS of the wrong head's delta", SUMS, "delta_of[fragment_half(i)]", "delta_of[1 - fragment_half(i)]"),
    Mutant("epilogue adds to the next row", SUMS, "rows[i + 1] = pair.y;", "rows[i + 1] = pair.x;"),
    Mutant("RoPE rows of the other group", SUMS, "const i32 row = group ?", "const i32 row = !group ?"),
    # The weight-stationary plan
    Mutant(
        "quadrant of P^T",
        SCORES,
        "return tmem.lane(thread / kWarpThreads * kWarpThreads);",
        "return tmem.lane((thread / kWarpThreads ^ 1) * kWarpThreads);",
        WS,
    ),
    Mutant(
        "dP^T one column short",
        SCORES,
        "kColumnDp = kColumnP + kScoreColumns",
        "kColumnDp = kColumnP + kScoreColumns - 1",
        WS,
    ),
    Mutant("ordinary products", "ptx/tcgen05.cuh", "tcgen05.mma.ws.cta_group", "tcgen05.mma.cta_group", WS),
    Mutant(
        "dims of dQ of the other group",
        SCORES,
        "const i32 group = thread / kBlockHeads;",
        "const i32 group = 1 - thread / kBlockHeads;",
        WS,
    ),
    Mutant(
        "heads of the next warp",
        SCORES,
        "const i32 head = thread / kWarpThreads * kScores + i;",
        "const i32 head = (thread / kWarpThreads ^ 1) * kScores + i;",
        WS,
    ),
    Mutant("RoPE keys of the other group", SCORES, "list[16 * group + 8 * r", "list[16 * (1 - group) + 8 * r", WS),
    Mutant(
        "stride of Q in dKV",
        SCORES,
        "mn_major_matrix(smem_addr(dims), kSw128Bytes)",
        "mn_major_matrix(smem_addr(dims), kKeySwTileBytes)",
        WS,
    ),
]


@mutants.as_verdict
def verdict(kernel: str, mode: tuple[str, int], low_scores: bool = False) -> None:
    """What a run shows; empty if nothing."""
    inputs = make(LOW_CASE if low_scores else CASE)
    if low_scores:
        lower_scores(inputs)
    with simulated(2, (10, 0), *mode):
        got = flat(mla_cupy.sparse_mla_backward)(*inputs.backward_arguments, **inputs.options, kernel=kernel)
    check_gradients(got, inputs)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    """In one of the modes: deadlocks and late completion show most."""
    plant(mutant)
    modes = MODES[:1] if mutant.low_scores else MODES
    shown = any(verdict(mutant.kernel, mode, mutant.low_scores) for mode in modes)
    assert shown, f"nothing shows that {mutant.name}"


# Low scores are about numbers, which are the same in every mode.
@pytest.mark.one_in(8)
@pytest.mark.parametrize("kernel", ["sparse_backward_sm100", WS])
@pytest.mark.parametrize(("mode", "low_scores"), [*((mode, False) for mode in MODES), (MODES[0], True)], ids=str)
def test_kernels_as_they_are(kernel: str, mode: tuple[str, int], low_scores: bool) -> None:
    assert verdict(kernel, mode, low_scores) == ""
