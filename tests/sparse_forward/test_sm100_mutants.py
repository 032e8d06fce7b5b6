"""Bugs planted in the Blackwell kernels of the sparse forward: each must show, the kernels as they are must not.

A mutant is caught by an error of the simulator (a race, poison, a deadlock, a broken rule of the instruction set) or by
a wrong result, in at least one mode. Not every mode can see every bug: a read that comes too early is correct as long
as the write is early, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

import mla_cupy
from tests.support import mutants
from tests.support.flat import flat
from tests.support.mutants import steps
from tests.support.sim_driver import simulated
from tests.support.sim_modes import MODES
from tests.support.sparse_cases import SparseCase, SparseInputs, make
from tests.support.tolerance import check, check_lse

LOADS = "sparse_forward/sm100.cuh"
ROLES = "attention/sm100/swapped.cuh"
RESULTS = "attention/head_results.cuh"
SOURCE = "sparse_forward/sm100.cu"
KERNEL = "sparse_forward_sm100"
#: One block has both queries, of four tiles each, the last one short.
HEADS = 15


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """Queries of `heads` heads show it."""

    heads: int = HEADS


AFTER, BEFORE = "tcgen05.fence::after_thread_sync", "tcgen05.fence::before_thread_sync"
MUTANTS = [
    # Commits
    Mutant("no commit of the scores", SOURCE, *steps("tcgen05.commit", 0, of=8)),
    Mutant("Q never released", SOURCE, *steps("tcgen05.commit", 1, of=8)),
    Mutant("columns never released", SOURCE, *steps("tcgen05.commit", 3, of=8)),
    Mutant("RoPE columns never released", SOURCE, *steps("tcgen05.commit", 6, of=8)),
    Mutant("no commit of the values", SOURCE, *steps("tcgen05.commit", 7, of=8)),
    Mutant(
        "columns released before their values are multiplied",
        ROLES,
        "            constexpr i32 kSwTiles = kTileDims / kSw128Columns;\n",
        "            constexpr i32 kSwTiles = kTileDims / kSw128Columns;\n            release_group(stage, t);\n",
    ),
    Mutant(
        "Q released before the last scores",
        ROLES,
        "if (tile + together == tiles) tcgen05_commit(q_empty);",
        "if (tile == 0) tcgen05_commit(q_empty);",
    ),
    Mutant(
        "P released with the first dims",
        ROLES,
        "const i32 done = t + 1 < kDimTiles ?",
        "const i32 done = t + 1 < kDimTiles && t > 0 ?",
    ),
    # Waits
    Mutant("scores not waited for", SOURCE, *steps("mbarrier.try_wait", 0, of=9)),
    Mutant("rescaled before the products are done", SOURCE, *steps("mbarrier.try_wait", 1, of=9)),
    Mutant("stored before the products are done", SOURCE, *steps("mbarrier.try_wait", 2, of=9)),
    Mutant("Q not waited for", SOURCE, *steps("mbarrier.try_wait", 3, of=9)),
    Mutant("keys not waited for", SOURCE, *steps("mbarrier.try_wait", 4, of=9)),
    Mutant("RoPE columns not waited for", SOURCE, *steps("mbarrier.try_wait", 5, of=9)),
    Mutant("P not waited for", SOURCE, *steps("mbarrier.try_wait", 6, of=9)),
    Mutant("Q loaded before it is free", SOURCE, *steps("mbarrier.try_wait", 7, of=9)),
    Mutant("gather does not wait", SOURCE, *steps("mbarrier.try_wait", 8, of=9)),
    Mutant(
        "later columns not waited for",
        ROLES,
        "if (sw_tile % C::kGroupSwTiles != 0) return;",
        "if (sw_tile != 0) return;",
    ),
    Mutant(
        "parity of P stuck", ROLES, "tmem_wait(s.p_full[stage], ring.full_parity());", "tmem_wait(s.p_full[stage], 0);"
    ),
    Mutant(
        "one stage behind",
        ROLES,
        "const RingCount<kStages> last{ring.count - 1};",
        "const RingCount<kStages> last{ring.count - 2};",
    ),
    # Arrivals
    Mutant("P never announced", SOURCE, *steps("mbarrier.arrive", 0, of=3)),
    Mutant("K counted without one SW128 tile", LOADS, "(last - first) * kSw128Bytes", "kSw128Bytes"),
    # Fences
    Mutant("no after_thread_sync of the scores", SOURCE, *steps(AFTER, 1, of=8)),
    Mutant("no after_thread_sync of the rescaling", SOURCE, *steps(AFTER, 2, of=8)),
    Mutant("no after_thread_sync of the result", SOURCE, *steps(AFTER, 3, of=8)),
    Mutant("no after_thread_sync of the products", SOURCE, *steps(AFTER, 4, 5, 6, of=8)),
    Mutant("no before_thread_sync of P and the result", SOURCE, *steps(BEFORE, 1, of=3)),
    Mutant("P without a proxy fence", SOURCE, *steps("fence.proxy.async", 0, of=1)),
    Mutant("no fence of the barriers' init", SOURCE, *steps("fence.mbarrier_init", 0, of=1)),
    Mutant("scores used before they are loaded", SOURCE, *steps("tcgen05.wait::ld", 0, of=3)),
    Mutant("sums rescaled before they are loaded", SOURCE, *steps("tcgen05.wait::ld", 1, of=3)),
    Mutant("result stored before it is loaded", SOURCE, *steps("tcgen05.wait::ld", 2, of=3)),
    Mutant("rescaled sums not waited for", SOURCE, *steps("tcgen05.wait::st", 0, of=1)),
    # Barriers of the block
    Mutant("barriers used before they are there", SOURCE, *steps("bar.sync", 0, of=7)),
    Mutant("maxima not waited for", SOURCE, *steps("bar.sync", 1, of=7)),
    Mutant("sums not waited for", SOURCE, *steps("bar.sync", 2, of=7)),
    Mutant("factors not waited for", SOURCE, *steps("bar.sync", 3, of=7)),
    Mutant("tensor memory freed in use", SOURCE, *steps("bar.sync", 6, of=7)),
    Mutant("one buffer of maxima", ROLES, "auto& maxima = s.warp_values[stage];", "auto& maxima = s.warp_values[0];"),
    Mutant(
        "sums over the last maxima",
        ROLES,
        "heads, s.warp_values[ring.stage()], s.stats",
        "heads, s.warp_values[ring.stage() ^ 1], s.stats",
    ),
    # Tensor memory
    Mutant("tensor memory not given back", ROLES, "tcgen05_dealloc<kAllocated>(tmem);", ""),
    Mutant("too few columns allocated", ROLES, "kUsed <= 128 ? 128", "kUsed <= 128 ? 64"),
    Mutant("result over the scores", ROLES, "kScores = 0, kOut = kHeads;", "kScores = 0, kOut = kHeads / 2;"),
    Mutant("one place for two tiles' scores", ROLES, "tmem.lane(stage * kUpperLanes)", "tmem.lane(0)"),
    Mutant(
        "lanes of the next warp",
        ROLES,
        "return at.lane(thread / kWarpThreads * kWarpThreads);",
        "return at.lane((thread / kWarpThreads ^ 1) * kWarpThreads);",
    ),
    Mutant(
        "lower dims twice", ROLES, "tcgen05_ld_16x256b(x[1], at.lane(kUpperLanes));", "tcgen05_ld_16x256b(x[1], at);"
    ),
    Mutant("half of the sums rescaled", ROLES, "i < 2 * kDimTiles; ++i", "i < kDimTiles; ++i"),
    Mutant("never rescaled", ROLES, "scale.any_but_one() && !first", "false"),
    Mutant("a query adds to the one before", ROLES, "tile + i > 0", "true"),
    Mutant("a query's second pair begins anew", ROLES, "tile + i > 0", "i > 0"),
    Mutant("all lanes issue", ROLES, "    if (!elect_issuer()) return;\n", ""),
    # Operands
    Mutant(
        "stride of Q for K",
        ROLES,
        "smem_addr(s.kv[stage])), kSw128Bytes,",
        "smem_addr(s.kv[stage])), C::kQSwTileBytes,",
    ),
    Mutant(
        "values as scores' keys",
        ROLES,
        "kTileDims, C::kHeads, Major::MN, Major::K>",
        "kTileDims, C::kHeads, Major::K, Major::K>",
    ),
    Mutant(
        "rows of the next lane",
        LOADS,
        "sw_tile * kSw128Bytes + lane * kGatherBytes",
        "sw_tile * kSw128Bytes + (lane ^ 1) * kGatherBytes",
    ),
    Mutant(
        "the next query's heads",
        LOADS,
        "block.head0(), item.request, kEvictFirst",
        "block.head0(), item.request + 1, kEvictFirst",
    ),
    # Numbers
    Mutant("keys behind the end count", LOADS, "mask_rows(scores, item.tokens - tile * kTileKeys, thread);", ";"),
    Mutant("statistics carried over", ROLES, "            softmax.heads.reset();\n            for", "            for"),
    Mutant(
        "dims of the next tile", ROLES, "x, factors, t * kTileDims, thread", "x, factors, (t ^ 1) * kTileDims, thread"
    ),
    # The grid
    Mutant("heads of the first block", LOADS, "return (i32)blockIdx.x * C::kHeads;", "return 0;", 65),
]


@cache
def inputs_of(heads: int) -> SparseInputs:
    """Maxima grow by more than 2^8 within a pair of tiles, from pair to pair, and from query to query."""
    inputs = make(SparseCase(s_q=2, s_kv=300, h_q=heads, topk=197, invalid=0.0, seed=3))
    rows = np.concatenate(inputs.rows)
    inputs.q[...] = np.abs(inputs.q.astype(np.float32)) / 2
    place = {int(row): i % 197 // 64 for i, row in reversed(list(enumerate(rows)))}
    for row, tile in place.items():
        inputs.kv[row, :4] = 64.0 * tile
    return inputs


@mutants.as_verdict
def verdict(heads: int, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    inputs = inputs_of(heads)
    with simulated(1, (10, 0), *mode):
        got = flat(mla_cupy.sparse_mla_forward)(*inputs.arguments, **inputs.options, kernel=KERNEL)
    check(got[:2], inputs.exact[:2], inputs.rounded[:2], inputs.case.dtype)
    check_lse(got[2], inputs.exact[2], inputs.rounded[2])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: mutants.Plant) -> None:
    """In one of the modes: deadlocks and late completion show most."""
    plant(mutant)
    assert any(verdict(mutant.heads, mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("heads", [HEADS, 65])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_kernel_as_it_is(heads: int, mode: tuple[str, int]) -> None:
    assert verdict(heads, mode) == ""
