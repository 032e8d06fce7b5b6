"""Bugs planted in the kernels of the warm-up loss: each must show."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import heuristics
from tests.support.loss_cases import TENSOR_CORE_ERROR, LossCase, check_loss, loss_inputs, run_loss, splits_of
from tests.support.mutants import CAUGHT, Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated

RANGES, ROWS, KEYS = "indexer/loss/ranges.cu", "indexer/loss/rows.cu", "indexer/loss/generic_keys.cu"
SCORES, QUERIES = "indexer/loss/generic_scores.cu", "indexer/loss/generic_queries.cu"
CASE = LossCase(s_q=4, s_kv=6, h=2, lse=True, sequences=((2, 3), (2, 3)))
PARAMS = "indexer/loss/params.cuh"
BF16 = LossCase(s_q=2, s_kv=5, weights="bfloat16")
PER_HEAD = LossCase(s_q=2, s_kv=5, h=2, h_i=2, target="per_head", spread=20)

TARGET = "exp_from(target, norms.max_target)"

MUTANTS = [
    (Mutant("a query sees the next one's key", RANGES, "end_q - 1 - token", "end_q - 2 - token"), CASE),
    (Mutant("heads of infinite lse have a part", SCORES, "has_weights(lse)", "lse < 1e30f"), CASE),
    (Mutant("rows have no factor", ROWS, "? 0.f : row_weight *", "? 0.f :"), CASE),
    (Mutant("the target is not normalised", ROWS, "target * inverse;", "target;"), CASE),
    (Mutant("a maximum is not taken off", ROWS, TARGET, "exp_from(target, 0.f)"), PER_HEAD),
    (Mutant("inactive heads have gradients", QUERIES, "q.dot(key) > 0.f", "true"), CASE),
    (Mutant("a chunk forgets those before it", KEYS, "if (!p.first_chunk)", "if (false)"), CASE),
    (Mutant("weights in bfloat16 are read as floats", PARAMS, "p.weights_bf16 ? bits << 16 : bits", "bits"), BF16),
    (Mutant("all heads share a row", PARAMS, "p.per_head ? head : 0", "0"), PER_HEAD),
]  # fmt: skip

SCORES_SM90, QUERIES_SM90, KEYS_SM90 = (f"indexer/loss/sm90_{name}.cu" for name in ("scores", "queries", "keys"))
TILES = LossCase(s_q=12, s_kv=140, h=7, h_i=5, d=128, d_i=64, lse=True, sequences=((6, 100), (6, 38)))
MODES = (("late", 0), ("random", 1), ("random", 2), ("early", 0))
M_COLUMNS = "gradients[2 * step + i / 2]"
NO_PART = "-lse * kLog2E : negative_infinity()"
LSE_SM90, LSE_SUMS = "indexer/loss/sm90_lse.cu", "indexer/loss/sm90_lse.cuh"
LSE_TILES = LossCase(s_q=70, s_kv=300, h=2, h_i=1, d=264, d_i=32, spread=3, sequences=((30, 150), (38, 145)))
LSE_MUTANTS = [
    Mutant("keys out of sight count", LSE_SM90, "d[i] = seen ? d[i] :", "d[i] = true ? d[i] :"),
    Mutant("the lanes of a quad are not merged", LSE_SUMS, "quad_sum(sum)", "sum"),
    Mutant("a sum is not rescaled", LSE_SUMS, "        sum *= ex2_approx(before - shift());\n", ""),
    Mutant(
        "a tile of keys is left out",
        LSE_SM90,
        "keys = tile.keys.begin; keys < tile.keys.end;",
        "keys = tile.keys.begin; keys < tile.keys.end - 1;",
    ),
    Mutant("a piece is filled that is in use", LSE_SM90, *steps("mbarrier.try_wait", 10, of=11)),
    Mutant(
        "a piece of K is released before it is read",
        LSE_SM90,
        *steps("wgmma.wait_group", *range(8), of=9),
    ),
    Mutant("queries are not waited for", LSE_SM90, *steps("mbarrier.try_wait", 0, of=11)),
]
OWN_KEYS = LossCase(s_q=5, s_kv=6, h=6, h_i=3, d=192, d_i=128, h_kv=6, pairs="k", lse=True)
MAIN_PIECES = "indexer/loss/sm90_pieces.cuh"
OWN_MUTANTS = [
    Mutant("a stage is filled that is in use", SCORES_SM90, *steps("mbarrier.try_wait", 5, of=8)),
    Mutant("a piece is released before it is read", SCORES_SM90, *steps("wgmma.wait_group", 0, 2, of=4)),
    Mutant("shared columns are not waited for", SCORES_SM90, *steps("mbarrier.try_wait", 0, of=8)),
    Mutant("index keys come over them in use", SCORES_SM90, *steps("mbarrier.try_wait", 6, of=8)),
    Mutant("heads have the first one's keys", SCORES_SM90, "head / p.kv_head_heads : 0", "0 : 0"),
    Mutant("nobody has the first turn", SCORES_SM90, "if (taken && math.warpgroup == 1) pass(math);", ""),
    Mutant("no turn ends", SCORES_SM90, "if (taken && (math.warpgroup == 0 || heads > 0)) pass(math);", ""),
    Mutant("the last columns are the first", MAIN_PIECES, "last ? p.k_rope_column :", "last ? 64 :"),
]
CODES = LossCase(s_q=9, s_kv=12, h=2, h_i=3, d=64, codes="uint8", lse=True, sequences=((4, 2), (5, 9)))
CODES_MUTANTS = [
    Mutant("scores are not scaled", SCORES_SM90, "key < p.s_kv ? key_scale(p, key) : 0.f", "1.f"),
    Mutant("gradients by scores are not", ROWS, "x * key_scale(p, key)", "x"),
    Mutant("those by keys still are", KEYS_SM90, "fabsf(scale) <= kMaxFloat ? scale : 0.f", "1.f"),
    Mutant("queries' scales stay in the weights", PARAMS, "if (p.q_scale == nullptr) return", "return"),
    Mutant("codes of the first chunk", "indexer/loss/decoded_queries.cu", "p.first_token + (i32)", "(i32)"),
    Mutant("queries of another token", QUERIES_SM90, "pair.first_token - p.first_fetched", "pair.first_token"),
    Mutant("keys' queries of another token", KEYS_SM90, "token - p.first_fetched", "token"),
]
HOPPER_MUTANTS = [
    Mutant("a piece is released before it is read", SCORES_SM90, *steps("wgmma.wait_group", 0, of=3)),
    Mutant("index keys come over keys in use", SCORES_SM90, *steps("mbarrier.try_wait", 6, of=8)),
    Mutant("index keys are not waited for", SCORES_SM90, *steps("mbarrier.try_wait", 3, of=8)),
    Mutant("tokens share a head's lse", SCORES_SM90, "lse[fragment_half(i)]", "lse[0]"),
    Mutant("an infinite lse counts", PARAMS, NO_PART, "-lse * kLog2E : 0.f"),
    Mutant("the columns of M are exchanged", QUERIES_SM90, M_COLUMNS, "gradients[2 * step + i % 2]"),
    Mutant("inactive heads have a part", QUERIES_SM90, "low > 0.f ?", "true ?"),
    Mutant("edges of tiles are not cleared", ROWS, "    clear_edges(p, row);\n", ""),
    Mutant("keys are copied as they are", "indexer/loss/finite_keys.cu", "finite ? x : (u16)0", "x"),
    Mutant("a stage is filled that is in use", KEYS_SM90, *steps("mbarrier.try_wait", 2, 3, of=6)),
    Mutant("the rows of M are exchanged", KEYS_SM90, "block % 2 * 2 + r]", "r * 2 + block % 2]"),
]  # fmt: skip
SEEN_TOKENS = "indexer/loss/sm90_keys.cuh"
SPLIT_MUTANTS = [
    Mutant("a split forgets tokens", KEYS_SM90, "min(begin + size, all.end)", "min(begin + size - 1, all.end)"),
    Mutant("splits overlap", KEYS_SM90, "all.begin + split * size", "all.begin + split * (size - 1)"),
    Mutant("the last token is forgotten", SEEN_TOKENS, "max(tokens.end, token + 1)", "max(tokens.end, token)"),
    Mutant("warps keep what they have seen", SEEN_TOKENS, "min(tokens.begin, of_warp.begin)", "tokens.begin"),
    Mutant("sums without a token are not cleared", KEYS_SM90, "if (p.first_chunk || share", "if (share"),
    Mutant("sums of earlier chunks are forgotten", KEYS_SM90, "before = p.first_chunk ?", "before = true ?"),
    Mutant("a split is left out", "indexer/loss/keys_sum.cu", "split < p.key_splits", "split < p.key_splits - 1"),
]
PAIRS = LossCase(s_q=23, s_kv=140, h=1, h_i=5, d=64, d_i=64, lse=True, sequences=((6, 100), (17, 38)))
PAIR_MUTANTS = [
    Mutant("queries are overwritten that are in use", QUERIES_SM90, *steps("mbarrier.try_wait", 3, of=5)),
    Mutant("queries are not waited for", QUERIES_SM90, *steps("mbarrier.try_wait", 0, of=5)),
    Mutant("a block leaves pairs out", QUERIES_SM90, "at -= gridDim.x", "at -= gridDim.x + 1"),
    Mutant("gradients of the same tile", QUERIES_SM90, "row + (tile + 1) * kTileKeys", "row + tile * kTileKeys"),
]
HEADS, HEAD_QUERIES, HEAD_KEYS = (f"indexer/loss/sm90_{name}.cu" for name in ("heads", "head_queries", "head_keys"))
HEAD_TILES = LossCase(
    s_q=70, s_kv=270, h=4, h_i=4, d=72, d_i=64, d_v=24, spread=2, target="per_head", sequences=((30, 230), (38, 38))
)
CLEAR_BLIND = "        if (kind == kBlind) clear_blind(s, stage, warpgroup, thread);\n"
ADD_VALUES = "        add_products(weights, s.units[v][0], out);\n"
FREE_VALUES = "        release(s.unit_empty[v], math.thread);\n"
ZEROED = "zero_nonfinite<bfloat16>(chunk)"
HEAD_MUTANTS = [
    Mutant("keys out of sight count", HEADS, "first_key, negative_infinity(), d)", "first_key, 0.f, d)"),
    Mutant("scores out of sight count", HEADS, "first_key, unseen_score(), a)", "first_key, 0.f, a)"),
    Mutant("the output keeps its factor", HEADS, "out[i] *= decay, out[i + 1] *= decay;", ";"),
    Mutant("sums keep their factor", HEADS, "        target *= ex2_approx(-more);\n", ""),
    Mutant("the target's maximum is not in the sum", HEADS, "fmaf(-target, more, divergence)", "divergence"),
    Mutant("the score's maximum is not in the sum", HEADS, "divergence = fmaf(target, more, divergence);", ""),
    Mutant("the lanes of a quad are not merged", HEADS, "quad_sum(row.divergence)", "row.divergence"),
    Mutant("values are released before they are read", HEADS, ADD_VALUES + FREE_VALUES, FREE_VALUES + ADD_VALUES),
    Mutant("values are copied as they are", "indexer/loss/finite_values.cu", ZEROED, "false"),
    Mutant("a unit is filled that is in use", HEADS, *steps("mbarrier.try_wait", 0, 1, 2, of=7)),
    Mutant("inactive heads have a part", HEAD_QUERIES, "a > 0.f ? score - target : 0.f", "score - target"),
    Mutant("rows have no factor", HEAD_QUERIES, "there && live ? row_weight(p, token)", "there && live ? 1.f"),
    Mutant("tokens see all keys", HEAD_KEYS, "seen ? a[i] : -1.f", "a[i]"),
    Mutant("both halves have the numbers of the first", HEAD_KEYS, "numbers + kHalfTokens", "numbers"),
    Mutant("what is blind is multiplied", HEAD_KEYS, CLEAR_BLIND, ""),
    Mutant("a stage is filled that is in use", HEAD_KEYS, *steps("mbarrier.try_wait", 2, 3, of=4)),
    Mutant("a split forgets a step", HEAD_KEYS, "min(begin + size, steps)}", "min(begin + size, steps) - 1}"),
]


def run(case: LossCase) -> None:
    inputs = loss_inputs(case)
    with simulated(1):
        got = run_loss(
            mla_cupy.indexer_warmup_loss,
            **inputs,
            **case.options,
            kernel="indexer_loss_generic_scores",
            buffer_bytes=2 * 8 * 128,
        )
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options))


def run_hopper(mode: tuple[str, int], case: LossCase = TILES, gradients: bool = True, **options: int) -> None:
    inputs = loss_inputs(case)
    kernel = "indexer_loss_sm90_heads" if case.target == "per_head" else "indexer_loss_sm90_scores"
    with simulated(1, (9, 0), *mode):
        got = run_loss(
            mla_cupy.indexer_warmup_loss, **inputs, **case.options, kernel=kernel, gradients=gradients, **options
        )
    exact = reference.indexer_warmup_loss(**inputs, **case.options, gradients=gradients)
    check_loss(got, exact, TENSOR_CORE_ERROR)


def run_own_keys(mode: tuple[str, int]) -> None:
    run_hopper(mode, OWN_KEYS, gradients=False)


def run_codes(mode: tuple[str, int]) -> None:
    """In chunks of a few tokens."""
    run_hopper(mode, CODES, buffer_bytes=4 * (10 * 128 + 2 * 3 * 32))


def run_splits(mode: tuple[str, int]) -> None:
    """Three of each tile of keys, some without a token, in chunks of seven tokens and five."""
    with splits_of(2, most=3):
        run_hopper(mode, buffer_bytes=7 * 10 * 256)


def run_pairs(mode: tuple[str, int]) -> None:
    """Several to a block."""
    with mock.patch.object(heuristics, "MAX_QUERY_BLOCKS", 3):
        run_hopper(mode, PAIRS)


def run_lse(mode: tuple[str, int]) -> None:
    run_hopper(mode, LSE_TILES, gradients=False)


def run_heads(mode: tuple[str, int]) -> None:
    """All heads in one split, so that its stages are used again."""
    with splits_of(2, most=1):
        run_hopper(mode, HEAD_TILES)


#: Which bugs show in which calls.
HOPPER = {
    run_hopper: HOPPER_MUTANTS,
    run_own_keys: OWN_MUTANTS,
    run_codes: CODES_MUTANTS,
    run_splits: SPLIT_MUTANTS,
    run_pairs: PAIR_MUTANTS,
    run_lse: LSE_MUTANTS,
    run_heads: HEAD_MUTANTS,
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("run_mode", HOPPER, ids=lambda run: run.__name__)
def test_hopper_without_a_bug(run_mode: Callable[[tuple[str, int]], None], mode: tuple[str, int]) -> None:
    run_mode(mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_mode", "mutant"),
    [(run_mode, mutant) for run_mode, mutants in HOPPER.items() for mutant in mutants],
    ids=lambda x: x.id if isinstance(x, Mutant) else x.__name__,
)
def test_shows_on_hopper(run_mode: Callable[[tuple[str, int]], None], mutant: Mutant, plant: Plant) -> None:
    """In one of the modes."""
    plant(mutant)
    assert any(as_verdict(run_mode)(mode) for mode in MODES)


@pytest.mark.parametrize("case", [CASE, PER_HEAD], ids=lambda case: case.id)
def test_without_a_bug(case: LossCase) -> None:
    run(case)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=lambda x: x.id if isinstance(x, Mutant) else "")
def test_shows(mutant: Mutant, case: LossCase, plant: Plant) -> None:
    plant(mutant)
    with pytest.raises(CAUGHT):
        run(case)
