"""Bugs planted in the kernels of the sparse stage's loss."""

from __future__ import annotations

from functools import partial

from tests.indexer.loss.test_sparse_loss_sim import bits_of_both_orders, run_hopper
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sparse_loss_cases import SparseLossCase

LIST_LSE, LIST_GRADIENTS = "indexer_loss_sm90_list_lse", "indexer_loss_sm90_list_gradients"
#: More pieces and tiles than stages, lists that end within a tile's half, and both kinds of queries in one place.
CASE = SparseLossCase(s_q=2, s_kv=300, topk=650, h=3, h_i=2, d=72, d_i=64, lse=True)
#: Heads of both warpgroups.
LSE_CASE = SparseLossCase(s_q=2, s_kv=300, topk=200, h=66, h_i=1, d=136)
MODES = (("late", 0), ("random", 1), ("early", 0))
RUNS = [partial(run_hopper, CASE, mode) for mode in MODES]


def run_both_orders() -> None:
    """Sums have the same bits in both."""
    assert len(bits_of_both_orders(deterministic=True)) == 1


test_scatter_is_caught, test_scatter_as_it_is = mutant_suite(
    "indexer_loss_generic_scatter",
    [run_both_orders],
    {},
    [
        Mutant(
            "bounds without weights",
            "indexer_loss_bounds",
            "finite_or_0(index_weight(p, token, head))",
            "1e-6f",
        )
    ],
)
test_scores_is_caught, test_scores_as_it_is = mutant_suite(
    "indexer_loss_sm90_list_scores",
    RUNS,
    {
        "bar.sync": (2, [0, 1]),
        "mbarrier.try_wait": (9, [4]),
        "mbarrier.arrive": (9, [0]),
        "fence.proxy": (4, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.mbarrier": (2, [0]),
        "wgmma.fence": (4, [0]),
        "wgmma.commit_group": (4, [0]),
        "wgmma.wait_group": (4, [0]),
    },
)
test_gradients_is_caught, test_gradients_as_it_is = mutant_suite(
    "indexer_loss_sm90_list_gradients",
    RUNS,
    {
        "bar.sync": (4, [0, 2]),
        "mbarrier.try_wait": (3, [0, 1]),
        "mbarrier.arrive": (3, [0]),
        "fence.proxy": (2, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.mbarrier": (1, [0]),
        "wgmma.fence": (2, [0]),
        "wgmma.commit_group": (2, [0]),
        "wgmma.wait_group": (2, [0]),
    },
    [Mutant("half of the sums are forgotten", LIST_GRADIENTS, "sums[i] + s.sums[i][thread]", "sums[i]")],
)
test_lse_is_caught, test_lse_as_it_is = mutant_suite(
    "indexer_loss_sm90_list_lse",
    [partial(run_hopper, LSE_CASE, mode) for mode in MODES],
    {
        "bar.sync": (1, [0]),
        "mbarrier.try_wait": (11, [0, 5]),
        "mbarrier.arrive": (11, [0]),
        "fence.proxy": (9, [0]),
        "fence.mbarrier_init": (1, [0]),
        "cp.async.mbarrier": (1, [0]),
        "wgmma.fence": (9, [0]),
        "wgmma.commit_group": (9, [0]),
        "wgmma.wait_group": (9, [0]),
    },
    [Mutant("zeros after a list's end count", LIST_LSE, "fragment_column(thread, i) < left", "true")],
)
