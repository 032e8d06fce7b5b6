"""Bugs planted in the logits kernel with mma.sync: each must show, the kernel as it is must not."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.indexer_cases import LogitsCase, PagedCase, check_logits, logits_inputs, paged_inputs
from tests.support.mutants import Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated

KERNEL = "indexer_logits_mma"
SOURCE, FP8, E2M1 = "indexer/logits/mma.cu", "ptx/fp8.cuh", "indexer/e2m1_keys.cuh"
MODES = (("late", 0), ("random", 1))
#: Two blocks of tokens, two tiles, of which the last one is not full.
CASE = LogitsCase(s_q=9, s_kv=290, h=5, d=64)
#: Two tokens at once.
PASSES = LogitsCase(s_q=3, s_kv=40, h=120, seed=3)
PAGES = PagedCase(b=2, s_q=2, h=3, seqlens=(90, 70), missing_page=True)
WITH_NAN = PagedCase(b=1, h=2, seqlens=(40,), e2m1=True)  # in a group of each key
#: The last group alone is multiplied, and its scale is up to 2^14 less than the others'.
LEAST = PagedCase(b=1, h=2, seqlens=(40,), e2m1=True, seed=1)
IN_E2M1 = PagedCase(b=2, s_q=2, h=3, seqlens=(90, 70), missing_page=True, e2m1=True)
CASES = (CASE, PASSES, PAGES, IN_E2M1, WITH_NAN, LEAST)

MUTANTS = [
    (Mutant("queries too early", SOURCE, *steps("bar.sync", 0, of=2)), PASSES),
    (Mutant("queries not awaited", SOURCE, *steps("bar.sync", 1, of=2)), PASSES),
    (Mutant("queries of too many tokens", SOURCE, "return min(kMaxTokens, kQuery", "return 1 + min(7, kQuery"), PASSES),
    (Mutant("ranges of other tokens", SOURCE, "walk.range.begin, first + token)", "walk.range.begin, token)"), PASSES),
    (Mutant("rows swizzled otherwise", SOURCE, "odd = even ^ kSliceBytes", "odd = even + kSliceBytes"), CASE),
    (Mutant("weights of other heads", SOURCE, "row + n * kMmaColumns + lane % 4 * 2", "row + lane % 4 * 2"), PASSES),
    (Mutant("weights past the last head", SOURCE, "head < p.heads ? weights[elem] : 0.f", "weights[elem]"), CASE),
    (Mutant("one token's heads", SOURCE, "add_heads(s, keys, token * heads + head,", "add_heads(s, keys, head,"), CASE),
    (Mutant("the same keys again", SOURCE, "walk.block, key + kTileKeys, lane)", "walk.block, key, lane)"), CASE),
    (
        Mutant(
            "scales of the next tile", SOURCE, "const float scale = next.scale;", "const float& scale = next.scale;"
        ),
        CASE,
    ),
    (Mutant("keys past the last one", SOURCE, "if (key >= p.num_keys) return {nullptr, nullptr};", ""), CASE),
    (Mutant("stored at another key", SOURCE, "stored_key = 8 * (lane % 4) + lane / 4;", "stored_key = lane;"), CASE),
    (Mutant("half a quad's sum", SOURCE, "__shfl_xor_sync(kFullWarp, odd ? even_pair : odd_pair, 1)", "0.f"), CASE),
    (Mutant("two products swapped", SOURCE, "[0][i % 2 + 2] = pairs.y", "[0][i % 2 + 2] = pairs.z"), CASE),
    (Mutant("negative products count", SOURCE, "fmaxf(products[1], 0.f)", "products[1]"), CASE),
    (Mutant("NaN is a number", FP8, " | n >> 1, kTo256", ", kTo256"), CASE),
    (
        Mutant(
            "pages that are not there", SOURCE, "if ((u32)page >= (u32)p.num_pages) return", "if (page == -1) return"
        ),
        PAGES,
    ),
    (
        Mutant("scales of another page", SOURCE, "(i64)p.page_size * kKeyBytes", "(i64)(p.page_size - 1) * kKeyBytes"),
        PAGES,
    ),
    (Mutant("a table for all groups", SOURCE, "E2m1Scales(scales[i]), slice)", "E2m1Scales(scales[i]), 0)"), IN_E2M1),
    (
        Mutant("scales of the first key", SOURCE, "E2m1Scales(scales[i]).of_key()", "E2m1Scales(scales[0]).of_key()"),
        IN_E2M1,
    ),
    (Mutant("subnormal numbers", E2M1, "less < 12", "less < 16"), LEAST),
    (Mutant("the least are zeros", E2M1, "less == 14 ? 0x03020100 : 0", "0"), LEAST),
    (Mutant("signs of neighbours", E2M1, "shifted, 0x1504", "shifted, 0x0415"), IN_E2M1),
    (Mutant("NaN is the largest", E2M1, "if (of(group) != kNanScale) largest", "largest"), WITH_NAN),
    (Mutant("NaN is a number", E2M1, "scale == kNanScale", "false"), WITH_NAN),
]


@as_verdict
def verdict(case: LogitsCase | PagedCase, mode: tuple[str, int]) -> None:
    """What a run shows; empty if nothing."""
    paged = isinstance(case, PagedCase)
    name, inputs = "indexer_logits" + "_paged" * paged, paged_inputs(case) if paged else logits_inputs(case)
    if case is CASE:
        inputs["k"][40, 3] = np.nan
    if case is WITH_NAN:
        inputs["cache"].reshape(len(inputs["cache"]), -1)[:, 64 * 64 :: 4] = 0xFF
    if case is LEAST:
        inputs["q"][..., :96] = 0
        exponents = inputs["cache"].reshape(len(inputs["cache"]), -1)[:, 64 * 64 :].reshape(-1, 64, 4)
        exponents[:, :, :3], exponents[:, :, 3] = 127, 127 - np.arange(64) % 15
    with simulated(2, (8, 0), *mode):
        got = getattr(mla_cupy, name)(**inputs, kernel=KERNEL)
    check_logits(got, inputs, getattr(reference, name)(**inputs))


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda x: x.id)
def test_is_caught(mutant: Mutant, case: LogitsCase | PagedCase, plant: Plant) -> None:
    plant(mutant)
    assert any(verdict(case, mode) for mode in MODES), f"nothing shows that {mutant.name}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel_as_it_is(case: LogitsCase | PagedCase) -> None:
    assert [verdict(case, mode) for mode in MODES] == ["", ""]
