"""Bugs planted in the kernels of the warm-up loss."""

from __future__ import annotations

from functools import partial
from unittest import mock

import mla_cupy
from mla_cupy import reference
from mla_cupy.kernels.indexer.loss import heuristics
from tests.support.loss_cases import TENSOR_CORE_ERROR, LossCase, check_loss, loss_inputs, run_loss, splits_of
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

CASE = LossCase(s_q=4, s_kv=6, h=2, lse=True, sequences=((2, 3), (2, 3)))
PER_HEAD = LossCase(s_q=2, s_kv=5, h=2, h_i=2, target="per_head", spread=20)
TILES = LossCase(s_q=12, s_kv=140, h=1, h_i=5, d=64, d_i=64, lse=True, sequences=((6, 100), (6, 38)))
OWN_KEYS = LossCase(s_q=5, s_kv=6, h=6, h_i=3, d=192, d_i=128, h_kv=6, pairs="k", lse=True)
LSE_TILES = LossCase(s_q=9, s_kv=150, h=2, h_i=1, d=264, d_i=32, spread=3, sequences=((3, 20), (5, 129)))
HEAD_TILES = LossCase(
    s_q=9, s_kv=140, h=4, h_i=4, d=72, d_i=64, d_v=24, spread=2, target="per_head", sequences=((4, 100), (4, 38))
)
MODES = (("late", 0), ("random", 1), ("early", 0))


def run(case: LossCase) -> None:
    """Run the generic kernels, in chunks of a few tokens."""
    inputs = loss_inputs(case)
    options = {"kernel": "indexer_loss_generic_scores", "buffer_bytes": 2 * 8 * 128}
    with simulated(1):
        got = run_loss(mla_cupy.indexer_warmup_loss, **inputs, **case.options, **options)
    check_loss(got, reference.indexer_warmup_loss(**inputs, **case.options))


def run_hopper(case: LossCase, mode: tuple[str, int], gradients: bool = True, **options: int) -> None:
    inputs = loss_inputs(case)
    kernel = "indexer_loss_sm90_heads" if case.target == "per_head" else "indexer_loss_sm90_scores"
    with simulated(1, (9, 0), *mode):
        got = run_loss(
            mla_cupy.indexer_warmup_loss, **inputs, **case.options, kernel=kernel, gradients=gradients, **options
        )
    exact = reference.indexer_warmup_loss(**inputs, **case.options, gradients=gradients)
    check_loss(got, exact, TENSOR_CORE_ERROR)


def run_tiles(mode: tuple[str, int]) -> None:
    """Three splits of each tile of keys, some without a token, in chunks of seven tokens and five; pairs in turn."""
    with splits_of(2, most=3), mock.patch.object(heuristics, "MAX_QUERY_BLOCKS", 1):
        run_hopper(TILES, mode, buffer_bytes=7 * 10 * 256)


def run_heads(mode: tuple[str, int]) -> None:
    """All heads in one split, so that its stages are used again."""
    with splits_of(2, most=1):
        run_hopper(HEAD_TILES, mode)


OF_TILES = [partial(run_tiles, mode) for mode in MODES]
OF_HEADS = [partial(run_heads, mode) for mode in MODES]

test_rows_is_caught, test_rows_as_it_is = mutant_suite(
    "indexer_loss_rows",
    [partial(run, CASE), partial(run, PER_HEAD)],
    {
        "bar.sync": (6, [1, 3]),
    },
    [
        Mutant("a query sees the next key", "indexer_loss_ranges", "end_q - 1 - token", "end_q - 2 - token"),
        Mutant("inactive heads have gradients", "indexer_loss_generic_queries", "q.dot(key) > 0.f", "true"),
    ],
)
test_lse_is_caught, test_lse_as_it_is = mutant_suite(
    "indexer_loss_sm90_lse",
    [partial(run_hopper, LSE_TILES, mode, gradients=False) for mode in MODES],
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (11, [0, 5]),
        "mbarrier.arrive": (11, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.commit_group": (9, [0]),
        "wgmma.wait_group": (9, [0]),
    },
)
test_scores_is_caught, test_scores_as_it_is = mutant_suite(
    "indexer_loss_sm90_scores",
    [partial(run_hopper, OWN_KEYS, mode, gradients=False) for mode in MODES],
    {
        "bar.sync": (2, [0]),
        "bar.arrive": (2, [0, 1]),
        "mbarrier.try_wait": (8, [0, 4]),
        "mbarrier.arrive": (9, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (3, [0]),
        "wgmma.commit_group": (3, [0]),
        "wgmma.wait_group": (4, [0]),
    },
)
test_queries_is_caught, test_queries_as_it_is = mutant_suite(
    "indexer_loss_sm90_queries",
    OF_TILES,
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (5, [0]),
        "mbarrier.arrive": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (2, [0]),
        "wgmma.commit_group": (2, [0]),
        "wgmma.wait_group": (2, [0]),
    },
)
test_keys_is_caught, test_keys_as_it_is = mutant_suite(
    "indexer_loss_sm90_keys",
    OF_TILES,
    {
        "bar.sync": (2, [1]),
        "mbarrier.try_wait": (6, [0]),
        "mbarrier.arrive": (5, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (5, [0]),
        "wgmma.commit_group": (5, [0]),
        "wgmma.wait_group": (3, [0]),
    },
    [Mutant("a split is left out", "indexer_loss_keys_sum", "split < p.key_splits", "split < p.key_splits - 1")],
)
test_heads_is_caught, test_heads_as_it_is = mutant_suite(
    "indexer_loss_sm90_heads",
    OF_HEADS,
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (7, [3]),
        "mbarrier.arrive": (7, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
    [Mutant("lanes are not merged", "indexer_loss_sm90_heads", "quad_sum(row.divergence)", "row.divergence")],
)
test_head_queries_is_caught, test_head_queries_as_it_is = mutant_suite(
    "indexer_loss_sm90_head_queries",
    OF_HEADS,
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (5, [2]),
        "mbarrier.arrive": (5, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (3, [0]),
        "wgmma.commit_group": (3, [1]),
        "wgmma.wait_group": (2, [0]),
    },
)
test_head_keys_is_caught, test_head_keys_as_it_is = mutant_suite(
    "indexer_loss_sm90_head_keys",
    OF_HEADS,
    {
        "bar.sync": (3, [1]),
        "mbarrier.try_wait": (4, [0, 2]),
        "mbarrier.arrive": (5, [0]),
        "fence.proxy": (1, [0]),
        "fence.mbarrier_init": (1, [0]),
        "wgmma.fence": (5, [0]),
        "wgmma.commit_group": (5, [1]),
        "wgmma.wait_group": (3, [0]),
    },
)
