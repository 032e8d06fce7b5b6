"""Bugs planted in the kernels of the sparse stage's loss: each must show."""

from __future__ import annotations

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.indexer.loss.test_sparse_loss_sim import GENERIC, MODES, bits_of_both_orders, run_hopper
from tests.support.loss_cases import run_loss
from tests.support.mutants import CAUGHT, Mutant, Plant, as_verdict, steps
from tests.support.sim_driver import simulated
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

SCATTER, BOUNDS = "indexer/loss/generic_scatter.cu", "indexer/loss/bounds.cu"
PARAMS, RANGES = "indexer/loss/params.cuh", "indexer/loss/ranges.cu"
CASE = SparseLossCase(s_q=4, topk=5)

MUTANTS = [
    Mutant("inactive heads have gradients", SCATTER, "q.dot(key) > 0.f", "true"),
    Mutant("a place is its own row", PARAMS, "p.rows == nullptr ? at", "true ? at"),
    Mutant("lists of the first token", PARAMS, "p.rows[token * p.rows_stride_elems + at]", "p.rows[at]"),
    Mutant("lists are as long as all keys", RANGES, "KeyRange{0, p.counts[token]}", "KeyRange{0, p.s_kv}"),
    Mutant("all numbers in one bin", SCATTER, "bins.index(fabsf(value))", "0"),
]  # fmt: skip
LIST_SCORES, LIST_GRADIENTS = (f"indexer/loss/sm90_list_{name}.cu" for name in ("scores", "gradients"))
LISTS, LIST_LSE = "indexer/loss/sm90_lists.cuh", "indexer/loss/sm90_list_lse.cu"
#: More pieces and tiles than stages, lists that end within a tile's half, and both kinds of queries in one place.
HOPPER_CASE = SparseLossCase(s_q=3, s_kv=300, topk=650, h=3, h_i=2, d=72, d_i=64, lse=True)
#: The same, of both warpgroups.
LSE_CASE = SparseLossCase(s_q=2, s_kv=300, topk=650, h=66, h_i=1, d=136)
HOPPER_MUTANTS = [
    Mutant("what a row lacks is read", LISTS, "inside && rows.present[i]", "rows.present[i]"),
    Mutant("both halves are the first", LISTS, "half * kSw128Bytes + sw128_offset", "sw128_offset"),
    Mutant("a piece is released before it is read", LIST_SCORES, *steps("wgmma.wait_group", 0, of=4)),
    Mutant(
        "index queries come over queries in use",
        LIST_SCORES, *steps("mbarrier.try_wait", 1, of=9),
    ),
    Mutant("the lanes of a quad are not summed", LIST_SCORES, "quad_sum(sums[r])", "sums[r]"),
    Mutant("pieces are not fenced", LIST_SCORES, *steps("fence.proxy.async", 0, 1, 2, 3, of=4)),
    Mutant("tiles are not fenced", LIST_GRADIENTS, *steps("fence.proxy.async", 0, of=2)),
    Mutant("M is not waited for", LIST_GRADIENTS, *steps("bar.sync", 2, of=4)),
    Mutant("M has weights", LIST_GRADIENTS, "a[at] > 0.f ? keys.scaled[r]", "a[at] > 0.f ? keys.scaled[r] * weights.x"),
    Mutant("four columns are in another order", LIST_GRADIENTS, "math.thread % 4 / 2 * 4", "math.thread % 2 * 4"),
    Mutant("the second warpgroup's sums are forgotten", LIST_GRADIENTS, "sums[i] + s.sums[i][thread]", "sums[i]"),
]  # fmt: skip
LSE_MUTANTS = [
    Mutant("zeros after the end of a list count", LIST_LSE, "fragment_column(thread, i) < left", "true"),
    Mutant("both warpgroups have the same heads", LIST_LSE, "const i32 head = warpgroup *", "const i32 head = 0 *"),
    Mutant("one warpgroup releases for both", LIST_LSE, "heads > kSw128Rows ? kMathWarps :", "false ? kMathWarps :"),
    Mutant("queries are not waited for", LIST_LSE, *steps("mbarrier.try_wait", 0, of=11)),
    Mutant("pieces are not fenced", LIST_LSE, *steps("fence.proxy.async", *range(9), of=9)),
    Mutant("a piece is filled that is in use", LIST_LSE, *steps("mbarrier.try_wait", 10, of=11)),
]
LOW_BOUND = Mutant("bounds without weights", BOUNDS, "finite_or_0(index_weight(p, token, head))", "1e-6f")


def run() -> None:
    """Against the oracle; and small numbers beside large ones, whose bins differ."""
    inputs = sparse_loss_inputs(CASE)
    inputs["weights"] *= np.array([1, 1e-4, 1e-4, 1], np.float32)[:, None]
    options = {"causal": CASE.causal, "deterministic": True, "buffer_bytes": 1, "kernel": GENERIC}
    wide = np.zeros(inputs["index_k"].shape, np.float32)
    with simulated(1):
        got = run_loss(mla_cupy.indexer_sparse_loss, **inputs, **options, d_index_k=wide)
    exact = reference.indexer_sparse_loss(**inputs, causal=CASE.causal)
    check_sparse_loss(got, exact)
    assert exact.d_index_k is not None
    rows = np.setdiff1d(inputs["indices"][1], inputs["indices"][[0, 2, 3]])
    rows = rows[(rows >= 0) & (rows < CASE.s_kv)]
    small = exact.d_index_k[rows]
    assert small.size
    np.testing.assert_allclose(got[4][rows], small, rtol=0, atol=1e-3 * np.abs(small).max())


def test_without_a_bug() -> None:
    run()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_shows(mutant: Mutant, plant: Plant) -> None:
    plant(mutant)
    with pytest.raises(CAUGHT):
        run()


@pytest.mark.slow
def test_the_order_shows_bounds_that_are_too_low(plant: Plant) -> None:
    plant(LOW_BOUND)
    assert len(bits_of_both_orders(deterministic=True)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", [HOPPER_CASE, LSE_CASE], ids=lambda case: case.id)
def test_hopper_without_a_bug(case: SparseLossCase, mode: tuple[str, int]) -> None:
    run_hopper(case, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "case"),
    [*((mutant, HOPPER_CASE) for mutant in HOPPER_MUTANTS), *((mutant, LSE_CASE) for mutant in LSE_MUTANTS)],
    ids=lambda x: x.id,
)
def test_shows_on_hopper(mutant: Mutant, case: SparseLossCase, plant: Plant) -> None:
    """In one of the modes."""
    plant(mutant)
    assert any(as_verdict(run_hopper)(case, mode) for mode in MODES)
