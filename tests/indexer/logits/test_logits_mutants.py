"""Bugs planted in the logits kernels for Hopper: each must show, the kernels as they are must not."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.indexer_cases import LogitsCase, PagedCase, as_codes, check_logits, logits_inputs, paged_inputs
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated

PREFILL, PAGED = "indexer/logits/sm90.cu", "indexer/logits/sm90_paged.cu"
SHARED, LINE = "indexer/logits/sm90.cuh", "indexer/logits/line.cuh"
RANGES, E2M1 = "indexer/key_ranges.cuh", "indexer/e2m1_near.cuh"
SUMS = "indexer/logits/sm90_head_sums.cuh"
MODES = (("late", 0), ("random", 1), ("random", 2), ("early", 0))
#: Two blocks of tokens; more tiles than the ring has stages.
CASE = LogitsCase(s_q=9, s_kv=700, h=4, ranges="none")
RANGED = LogitsCase(s_q=9, s_kv=300, h=3, d=32, seed=1)
MANY = LogitsCase(s_q=17, s_kv=900, h=4, ranges="none")
NINE = LogitsCase(s_q=3, s_kv=100, h=9, d=32)
PAGES = PagedCase(b=1, s_q=2, h=9, seqlens=(800,))
#: Products of two tokens, then of one.
THREE = PagedCase(b=1, s_q=3, h=9, seqlens=(800,))
#: Not all tokens see the last page, which is full.
EDGE = PagedCase(b=1, s_q=3, h=9, seqlens=(128,))
#: More sequences than a warp has lanes, of which the first 32 have nothing.
GROUPS = PagedCase(b=74, h=2, seqlens=(0,) * 32 + (1, 70, 0, 64, 2, 0) * 7)
#: A share so long that its first pages, of which one is none, and its queries are brought into L2 ahead.
LONG = PagedCase(b=1, s_q=2, h=2, seqlens=(8200,), missing_page=True)
SEQUENCES = PagedCase(b=40, h=2, seqlens=(70, 0, 1, 64, 2) * 8)
#: Keys in e2m1: pages of two sequences, more than the ring has stages; and scales that are far apart, or no numbers.
IN_E2M1 = PagedCase(b=2, s_q=3, h=9, seqlens=(1300, 70), missing_page=True, e2m1=True)
FAR = PagedCase(b=1, s_q=2, h=9, seqlens=(128,), e2m1=True)
HALF = LogitsCase(s_q=9, s_kv=300, h=12, dtype="uint8", ranges="none", float16=True)

ONE_BARRIER = (
    """return barrier[walk.wraps & 1][walk.stage];
    }
    template <i32 kStep>
    MLA_DEVICE void wait(const StageWalk<kStages, kStep>& walk) {
        mbarrier_wait(of(walk), walk.wraps >> 1 & 1);""",
    """return barrier[0][walk.stage];
    }
    template <i32 kStep>
    MLA_DEVICE void wait(const StageWalk<kStages, kStep>& walk) {
        mbarrier_wait(of(walk), walk.wraps & 1);""",
)

EARLY_WEIGHTS = (
    """        }
    }
    cp_async_mbarrier_arrive_noinc(s.q_full[stage]);""",
    """        }
    }
    mbarrier_arrive(s.q_full[stage]);""",
)
FIRST_WEIGHTS = ("of_tokens.at(group * kGroupHeads / 8 + j)", "of_tokens.at(j)")
ONE_TOKEN_MORE = (
    "token < p.block_tokens; ++token) {\n        const u8* heads",
    "token <= p.block_tokens; ++token) {\n        const u8* heads",
)
WAIT_FOR_QUERIES = "        mbarrier_wait(s.q_empty[query.stage], query.parity() ^ 1);"

RELEASED_UNREAD = (
    "        const i32 first = own.row & ~8;\n",
    "        release(s.k_empty[stage], thread);\n        __syncwarp();\n        const i32 first = own.row & ~8;\n",
)
FLAT = "(first + 8 * i) * kSw64RowBytes + 16 * step"

SECOND_ROW = "max_x2(float16{}, d[2 * i + 1], 0)"

MUTANTS = [
    (Mutant("negative products of half of the heads count", SUMS, SECOND_ROW, "d[2 * i + 1]"), HALF),
    (
        Mutant(
            "sums are those of divided weights", PREFILL, "total[i] * s.weight_scales[query_stage][token]", "total[i]"
        ),
        HALF,
    ),
    (Mutant("a stage has one full barrier", SHARED, *ONE_BARRIER), MANY),
    (
        Mutant(
            "the next tile is fetched over sums without a fence",
            PREFILL,
            *steps("fence.proxy.async", 0, of=1),
        ),
        CASE,
    ),
    (Mutant("sums are read before all are there", PREFILL, *steps("bar.sync", 2, of=3)), CASE),
    (Mutant("the last heads are left out", PREFILL, "ceil_div(p.heads, kTileHeads)", "max(1, p.heads / 8)"), NINE),
    (Mutant("a range has one key more", RANGES, "key < end", "key <= end"), RANGED),
    (Mutant("a share ends a tile early", LINE, "min(tiles.end, to.tile)", "min(tiles.end, to.tile - 1)"), RANGED),
    (Mutant("the line ends too early", PAGED, "TileCut{ranges.num_blocks, 0}", "TileCut{39, 0}"), SEQUENCES),
    (Mutant("a sequence's place is that in another group", PAGED, "if (of != group)", "if (false)"), GROUPS),
    (Mutant("a page that is none is brought into L2", PAGED, "if (page < (u32)p.num_pages)", "if (true)"), LONG),
    (Mutant("queries of a token that is none are brought into L2", PAGED, *ONE_TOKEN_MORE), LONG),
    (Mutant("roles begin before barriers are there", PAGED, *steps("bar.sync", 0, of=1)), PAGES),
    (Mutant("pages are those of the first sequence", PAGED, "if (!looked_up)", "if (false)"), SEQUENCES),
    (
        Mutant("a page is released with tokens to come", PAGED, "token + kTokens == sequence.tokens", "token == 0"),
        THREE,
    ),
    (Mutant("a product is not waited for", PAGED, "wgmma_wait_group<0>();", "wgmma_wait_group<1>();"), THREE),
    (Mutant("later tokens have the first one's row", PAGED, "token * sequence.row_bytes", "0"), THREE),
    (Mutant("the second token has the first one's row", PAGED, "block, own.c / 2)", "block, 0)"), THREE),
    (Mutant("the second token has the first one's weights", PAGED, *FIRST_WEIGHTS), THREE),
    (Mutant("the second token has the first one's weights", PAGED, *FIRST_WEIGHTS), PAGES),
    (
        Mutant("the third token has the first one's weights", PAGED, "weights + token * kBlockHeads / 2", "weights"),
        THREE,
    ),
    (
        Mutant("weights in registers are those of other heads", PAGED, "held[i] = from[4 * i]", "held[i] = from[i]"),
        PAGES,
    ),
    (Mutant("a warp begins each sequence anew", PAGED, "ahead = numbers.tile - end;", "ahead = warp;"), SEQUENCES),
    (Mutant("a page is whole for the last token alone", PAGED, "end = min(end,", "end = max(end,"), EDGE),
    (Mutant("weights are announced before they are there", PAGED, *EARLY_WEIGHTS), SEQUENCES),
    (Mutant("queries come over those of a sequence in use", PAGED, WAIT_FOR_QUERIES, ""), SEQUENCES),
    (
        Mutant("half of a row's threads are left out", PAGED, "add_in_pair(first, second, 2, own.c / 2)", "first"),
        PAGES,
    ),
    (Mutant("a page of e2m1 is released unread", PAGED, *RELEASED_UNREAD), IN_E2M1),
    (Mutant("halves of a step are swapped", PAGED, "low | high << 16", "high | low << 16"), IN_E2M1),
    (Mutant("the other key's fragment", PAGED, "a[step][i] = keys.x;", "a[step][1 - i] = keys.x;"), IN_E2M1),
    (Mutant("codes are not swizzled", PAGED, "sw64_offset(first + 8 * i, step)", FLAT), IN_E2M1),
    (Mutant("a table for all steps", PAGED, "tables.of(step)", "tables.of(0)"), IN_E2M1),
    (Mutant("the other key's scale", PAGED, "own.row == first ?", "own.row != first ?"), IN_E2M1),
    (Mutant("scales of the first key alone", PAGED, "are_near(scales[1])", "true"), FAR),
    (Mutant("one lane's keys decide", PAGED, "__all_sync(kFullWarp, ", "__any_sync(kFullWarp, "), FAR),
    (Mutant("subnormal numbers are near", E2M1, "kNear = 12", "kNear = 13"), FAR),
    (Mutant("NaN is near", E2M1, "most != kNanScale && ", ""), FAR),
    (Mutant("zero moves with its scale", E2M1, "0x1110 * group + 4", "0x1111 * group"), IN_E2M1),
]


@as_verdict
def verdict(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    options = {}
    if isinstance(case, PagedCase):
        name, inputs = "indexer_logits_paged", paged_inputs(case)
        if case is FAR:
            scales = inputs["cache"].reshape(len(inputs["cache"]), -1)[:, 64 * 64 :].reshape(-1, 64, 4)
            scales[...] = 120
            scales[0::2, 1, 1], scales[1::2, 9, 1] = 108, 108  # by pages, of one half of a warp's keys alone
            scales[:, 53] = 249, 250, 255, 248
            inputs["q"][..., :32] = inputs["q"][..., 64:] = 0
    else:
        name, inputs = "indexer_logits", logits_inputs(case)
        options = {"accumulate": "float16"} if case.float16 else {}
    with simulated(3 if case in (RANGED, GROUPS) else 1, (9, 0), *mode):
        got = getattr(mla_cupy, name)(**inputs, **options)
    check_logits(got, inputs, getattr(reference, name)(**inputs, **options))
    if case is FAR:
        np.testing.assert_array_equal(got[..., 53], 0)  # a product that is NaN counts as none


@as_verdict
def verdict_of_the_largest() -> None:
    """What the largest sums of heads in float16 show, with weights that are small where a lane looks."""
    q, k = as_codes(np.full((1, 128, 128), 1.0)), as_codes(np.full((3, 128), 448.0))
    weights = np.where(np.arange(128) % 4 == 0, 1, 1e4).astype(np.float32)[None]
    with simulated(1):
        got = mla_cupy.indexer_logits(q, k, weights, accumulate="float16")
    np.testing.assert_allclose(got, reference.indexer_logits(q, k, weights), rtol=1e-2)


LARGEST = "for (i32 step = kMaxTokens; step < kWarpThreads; step *= 2) {\n        largest"
LARGE_WEIGHTS = [
    Mutant("weights are too large for sums in float16", SUMS, "1 + kThreadHeadsLog2;", "1;"),
    Mutant("a lane's largest weight is a token's", PREFILL, LARGEST, LARGEST.replace("kMaxTokens", "64")),
]


def test_the_largest_sums() -> None:
    assert not verdict_of_the_largest()


@pytest.mark.parametrize("mutant", LARGE_WEIGHTS, ids=lambda mutant: mutant.id)
def test_large_weights_are_caught(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    assert verdict_of_the_largest()


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda x: x.id)
def test_is_caught(mutant: Mutant, case: LogitsCase | PagedCase, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(case, mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "case", [CASE, RANGED, HALF, PAGES, THREE, EDGE, GROUPS, LONG, SEQUENCES, IN_E2M1, FAR], ids=lambda case: case.id
)
def test_kernels_as_they_are(case: LogitsCase | PagedCase) -> None:
    assert [verdict(case, mode) for mode in MODES[:2]] == ["", ""]
