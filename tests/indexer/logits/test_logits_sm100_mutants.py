"""Bugs planted in the logits kernel for Blackwell: each must show, the kernel as it is must not."""

from __future__ import annotations

import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.indexer_cases import LogitsCase, PagedCase, check_logits, logits_inputs, paged_inputs
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated

SOURCE = "indexer/logits/sm100.cu"
MODES = (("late", 0), ("random", 1), ("early", 0))
#: Three blocks of tokens, more tiles than the ring has stages, two chunks of columns of which one is not full.
CASE = LogitsCase(s_q=17, s_kv=300, h=19, d=32, dtype="uint8", ranges="none")
#: Steps of K.
DEEP = LogitsCase(s_q=2, s_kv=40, h=2, d=64)
PAGES = PagedCase(b=2, s_q=2, h=3, seqlens=(90, 140), missing_page=True)
WAIT, COMMIT, ARRIVE = "mbarrier.try_wait", "tcgen05.commit", "mbarrier.arrive"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"

MUTANTS = [
    (Mutant("weights not awaited", SOURCE, *steps(WAIT, 0, of=13)), CASE),
    (Mutant("products not awaited", SOURCE, *steps(WAIT, 1, of=13)), CASE),
    (Mutant("queries not awaited", SOURCE, *steps(WAIT, 2, of=13)), CASE),
    (Mutant("keys not awaited", SOURCE, *steps(WAIT, 3, of=13)), CASE),
    (Mutant("products over those that are read", SOURCE, *steps(WAIT, 4, of=13)), CASE),
    (Mutant("queries over those in use", SOURCE, *steps(WAIT, 5, of=13)), CASE),
    (Mutant("keys over those in use", SOURCE, *steps(WAIT, 12, of=13)), CASE),
    (Mutant("commits outlive the block", SOURCE, *steps(WAIT, *range(6, 12), of=13)), CASE),
    (Mutant("products are not announced", SOURCE, *steps(COMMIT, 0, of=3)), CASE),
    (Mutant("keys are not released", SOURCE, *steps(COMMIT, 1, of=3)), CASE),
    (Mutant("queries are not released", SOURCE, *steps(COMMIT, 2, of=3)), CASE),
    (Mutant("read products are not released", SOURCE, *steps(ARRIVE, 0, of=6)), CASE),
    (Mutant("weights are not released", SOURCE, *steps(ARRIVE, 1, of=6)), CASE),
    (
        Mutant("the issuer's view of the tiles is not released", SOURCE, "kMathWarps + 2 *", "kMathWarps + 1 *"),
        CASE,
    ),
    (Mutant("no end", SOURCE, *steps(ARRIVE, 3, of=6)), CASE),
    (Mutant("products read before their commit", SOURCE, *steps(AFTER, 1, of=3)), CASE),
    (Mutant("products issued before the reads", SOURCE, *steps(AFTER, 2, of=3)), CASE),
    (Mutant("released before the reads", SOURCE, *steps(BEFORE, 1, of=3)), CASE),
    (Mutant("32 registers too early", SOURCE, *steps("tcgen05.wait::ld", 0, of=2)), CASE),
    (Mutant("16 registers too early", SOURCE, *steps("tcgen05.wait::ld", 1, of=2)), PAGES),
    (Mutant("both warpgroups in one half", SOURCE, "(warpgroup * kScoreStages + stage)", "(stage)"), CASE),
    (Mutant("both stages in one place", SOURCE, "kScoreStages + stage) *", "kScoreStages) *"), CASE),
    (Mutant("another warp's lanes", SOURCE, "thread / kWarpThreads * kWarpThreads", "0"), CASE),
    (Mutant("the first chunk's queries", SOURCE, "kStageColumns + column]", "kStageColumns]"), CASE),
    (Mutant("the first chunk's weights", SOURCE, "weights + column + done)", "weights + done)"), CASE),
    (Mutant("the other stage's weights", SOURCE, "weights + query_stage * kStageColumns", "weights"), CASE),
    (Mutant("16 columns at last are left out", SOURCE, "if (done < count) add", "if (false) add"), PAGES),
    (Mutant("negative products count", SOURCE, "fmaxf(x[i + j], 0.f)", "x[i + j]"), CASE),
    (Mutant("another token's sum", SOURCE, "sums[(i + j) % kBlockTokens]", "sums[i % kBlockTokens]"), CASE),
    (Mutant("the first step's K", SOURCE, "step * kKMajorStepBytes", "0 * step"), DEEP),
    (Mutant("each step afresh", SOURCE, "shape, step > 0", "shape, false"), DEEP),
    (Mutant("added to what is there", SOURCE, "shape, step > 0", "shape, true"), CASE),
    (Mutant("no scales", SOURCE, "sums[token] * scale", "sums[token]"), CASE),
    (Mutant("the same tile", SOURCE, "tiles.begin + ahead, key);", "tiles.begin, key);"), CASE),
    (Mutant("pages that are not there", SOURCE, "(u32)page < (u32)p.num_pages ? page : -1", "page"), PAGES),
    (Mutant("the same page twice", SOURCE, "(kTileKeys / kPageKeys) + i)", "(kTileKeys / kPageKeys))"), PAGES),
    (Mutant("scales of the first page", SOURCE, "key / kPageKeys)", "0)"), PAGES),
    (Mutant("queries of the first sequence", SOURCE, "kPaged ? block : 0", "0"), PAGES),
    (Mutant("queries of the first tokens", SOURCE, "kPaged ? 0 : block * kBlockTokens", "0"), CASE),
]


@as_verdict
def verdict(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    paged = isinstance(case, PagedCase)
    name, inputs = "indexer_logits" + "_paged" * paged, paged_inputs(case) if paged else logits_inputs(case)
    with simulated(1, (10, 0), *mode):
        got = getattr(mla_cupy, name)(**inputs, kernel="indexer_logits_sm100" + "_paged" * paged)
    check_logits(got, inputs, getattr(reference, name)(**inputs))


@pytest.mark.parametrize("mutant", [mutant for mutant, _ in MUTANTS], ids=lambda mutant: mutant.id)
def test_is_caught(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    case = next(case for one, case in MUTANTS if one is mutant)
    assert any(verdict(case, mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [CASE, DEEP, PAGES], ids=lambda case: case.id)
def test_kernel_as_it_is(case: LogitsCase | PagedCase) -> None:
    assert [verdict(case, mode) for mode in MODES] == ["", "", ""]
