"""Bugs planted in the kernels of the sparse stage's loss: each must show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ptxsim.errors import SimError

import mla_cupy
from mla_cupy import reference
from tests.indexer.test_sparse_loss_sim import bits_of_both_orders
from tests.support.mutants import Mutant, planted
from tests.support.sim_driver import simulated
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

SCATTER, BOUNDS = "indexer/loss_scatter_generic.cu", "indexer/loss_bounds.cu"
PARAMS, RANGES = "indexer/loss_params.cuh", "indexer/loss_ranges.cu"
CASE = SparseLossCase(s_q=4, topk=5)

MUTANTS = [
    Mutant("inactive heads have gradients", SCATTER, "q.dot(key) > 0.f", "true"),
    Mutant("a place is its own row", PARAMS, "p.rows == nullptr ? at", "true ? at"),
    Mutant("lists of the first token", PARAMS, "p.rows[token * p.rows_stride_elems + at]", "p.rows[at]"),
    Mutant("lists are as long as all keys", RANGES, "KeyRange{0, p.counts[token]}", "KeyRange{0, p.s_kv}"),
    Mutant("all numbers in one bin", SCATTER, "bins.index(fabsf(value))", "0"),
]  # fmt: skip
LOW_BOUND = Mutant("bounds without weights", BOUNDS, "finite_or_0(index_weight(p, token, head))", "1e-6f")


def run() -> None:
    """Against the oracle; and small numbers beside large ones, whose bins differ."""
    inputs = sparse_loss_inputs(CASE)
    inputs["weights"] *= np.array([1, 1e-4, 1e-4, 1], np.float32)[:, None]
    wide = {"d_index_k": np.zeros(inputs["index_k"].shape, np.float32)}
    with simulated(1):
        got = mla_cupy.indexer_sparse_loss(**inputs, deterministic=True, buffer_bytes=1, **wide)
    exact = reference.indexer_sparse_loss(**inputs)
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
def test_shows(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(mutant, tmp_path / "cuda_src", monkeypatch), pytest.raises((AssertionError, SimError)):
        run()


@pytest.mark.slow
def test_the_order_shows_bounds_that_are_too_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(LOW_BOUND, tmp_path / "cuda_src", monkeypatch):
        assert len(bits_of_both_orders(deterministic=True)) == 2
