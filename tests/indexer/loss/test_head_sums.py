"""Sums over heads for tensor parallelism: ranks with a share of the heads get the loss of one rank with all."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, reference
from tests.support.loss_cases import (
    FLOAT32_ERROR,
    TENSOR_CORE_ERROR,
    Array,
    LossCase,
    check_loss,
    loss_inputs,
    of_one_rank,
    run_loss,
    shares,
)
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

GENERIC, HOPPER = "indexer_loss_generic_scores", "indexer_loss_sm90_scores"
LISTS = "indexer_loss_sm90_list_scores"
RANKS = 3
CASE = LossCase(s_q=4, s_kv=7, h=5, d=11, lse=True, sequences=((3, 5), (1, 1)))
SPARSE = SparseLossCase(s_q=4, h=5, d=11, lengths=True, lse=True)
LONG_LISTS = SparseLossCase(s_q=3, s_kv=40, topk=140, h=4, d=72, lengths=True)
TILES = LossCase(s_q=9, s_kv=131, h=3, h_i=3, d=136, d_i=128, lse=True, sequences=((4, 2), (0, 3), (4, 126)))


@pytest.fixture
def numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def summed(inputs: dict[str, Array], **options: Any) -> Array:
    """Sums over all ranks, as an all-reduce makes them."""
    total = sum(run_loss(mla_cupy.indexer_head_sums, **mine, **options) for mine in shares(inputs, RANKS))
    return np.asarray(total)


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "its own lse"])
def test_ranks_of_the_warmup_loss(numpy_backend: None, lse: bool) -> None:
    inputs = loss_inputs(LossCase(s_q=6, s_kv=9, h=5, lse=lse, sequences=((3, 5), (2, 4))))
    sums = summed(inputs)
    for rank in range(RANKS):
        got = run_loss(mla_cupy.indexer_warmup_loss, **of_one_rank(inputs, RANKS, rank), head_sums=sums)
        check_loss(got, reference.indexer_warmup_loss(**inputs))


@pytest.mark.parametrize("causal", [False, True])
def test_ranks_of_the_sparse_loss(numpy_backend: None, causal: bool) -> None:
    inputs = sparse_loss_inputs(SparseLossCase(h=5, lengths=True, lse=causal))
    sums = summed(inputs, causal=causal)
    given = of_one_rank(inputs, RANKS, 1)
    got = run_loss(mla_cupy.indexer_sparse_loss, **given, head_sums=sums, causal=causal)
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=causal))


def test_some_queries_at_a_time(numpy_backend: None) -> None:
    """The documented split: queries [a, b) with the keys [0, b), with gradients that add up."""
    inputs = loss_inputs(LossCase(s_q=7, s_kv=7, h=4))
    exact = reference.indexer_warmup_loss(**inputs)
    d_index_k = np.zeros(inputs["index_k"].shape)
    for a, b in ((0, 3), (3, 7)):
        of_keys = ("k", "index_k")
        piece = {name: x[:b] if name in of_keys else x[a:b] for name, x in inputs.items()}
        got = reference.indexer_warmup_loss(**of_one_rank(piece, RANKS, 0), head_sums=summed(piece))
        d_index_k[:b] += got.d_index_k
        for name in ("kl", "mass", "index_lse", "d_index_q", "d_weights"):
            np.testing.assert_allclose(getattr(got, name), getattr(exact, name)[a:b], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(d_index_k, exact.d_index_k, rtol=1e-6, atol=1e-9)


def check_ranks(case: LossCase, kernel: str, error: float, mode: tuple[str, int] = ("late", 0)) -> None:
    """Chunks of a few tokens, and a longer row than there are keys."""
    inputs = loss_inputs(case)
    made = []
    for mine in shares(inputs, RANKS):
        exact = reference.indexer_head_sums(**mine)
        wide = np.full((case.s_q, case.s_kv + 3), np.nan, np.float32)
        with simulated(2, (9, 0), *mode) as target:
            run_loss(
                mla_cupy.indexer_head_sums, **mine, kernel=kernel, buffer_bytes=1 << 11, head_sums=wide[:, : case.s_kv]
            )
        assert f"mla_{kernel}" in target.launched
        np.testing.assert_allclose(wide[:, : case.s_kv], exact, rtol=0, atol=error * max(1, exact.max()))
        assert (wide[:, : case.s_kv][exact == 0] == 0).all(), "zeros are exact where a query does not see"
        assert np.isnan(wide[:, case.s_kv :]).all()
        made.append(wide[:, : case.s_kv])
    with simulated(2, (9, 0), *mode) as target:
        given = of_one_rank(inputs, RANKS, 2)
        got = run_loss(mla_cupy.indexer_warmup_loss, **given, head_sums=sum(made), kernel=kernel, buffer_bytes=1 << 11)
    assert f"mla_{kernel}" in target.launched
    assert "mla_indexer_loss_generic_attention" not in target.launched
    check_loss(got, reference.indexer_warmup_loss(**inputs), error)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("late", 0), ("random", 1), ("early", 0)], ids=str)
def test_hopper_in_every_mode(mode: tuple[str, int]) -> None:
    check_ranks(TILES, HOPPER, TENSOR_CORE_ERROR, mode)


def test_hopper() -> None:
    """A kernel of one half each: of one rank."""
    inputs = loss_inputs(LossCase(s_q=3, s_kv=130, h=2, h_i=2, d=64, d_i=32, lse=True))
    exact = reference.indexer_head_sums(**shares(inputs, 1)[0])
    with simulated(2, (9, 0), "random", 3) as target:
        sums = run_loss(mla_cupy.indexer_head_sums, **shares(inputs, 1)[0], kernel=HOPPER)
        np.testing.assert_allclose(sums, exact, rtol=0, atol=FLOAT32_ERROR)
        got = run_loss(
            mla_cupy.indexer_warmup_loss, **of_one_rank(inputs, 1, 0), head_sums=sums, gradients=False, kernel=HOPPER
        )
    assert target.launched.count(f"mla_{HOPPER}") == 2
    check_loss(got, reference.indexer_warmup_loss(**inputs, gradients=False), TENSOR_CORE_ERROR)


def check_sparse(case: SparseLossCase, kernel: str, error: float, mode: tuple[str, int] = ("late", 0)) -> None:
    """Check chunks of one token; other tests cover the loss's kernels."""
    inputs = sparse_loss_inputs(case)
    options = {"causal": case.causal, "kernel": kernel, "buffer_bytes": 1}
    with simulated(2, (9, 0), *mode) as target:
        sums = summed(inputs, **options)
        got = run_loss(mla_cupy.indexer_sparse_loss, **of_one_rank(inputs, RANKS, 0), head_sums=sums, **options)
    assert f"mla_{kernel}" in target.launched
    assert ("mla_indexer_loss_generic_attention" in target.launched) == (not case.lse and kernel == GENERIC)
    exact = sum(reference.indexer_head_sums(**x, causal=case.causal) for x in shares(inputs, RANKS))
    np.testing.assert_allclose(sums, exact, rtol=0, atol=error)
    assert (sums[exact == 0] == 0).all(), "zeros are exact after the last of a list"
    check_sparse_loss(got, reference.indexer_sparse_loss(**inputs, causal=case.causal), error)


def test_sparse() -> None:
    check_sparse(SPARSE, GENERIC, FLOAT32_ERROR)


def test_sparse_on_hopper() -> None:
    check_sparse(LONG_LISTS, LISTS, TENSOR_CORE_ERROR, ("random", 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "per_head", "index_q": np.zeros((4, 5, 32)), "weights": np.zeros((4, 5))}, "head_sums.*per head"),
    ],
    ids=["per head"],
)
def test_mistakes(numpy_backend: None, changes: dict[str, Any], words: str) -> None:
    inputs = loss_inputs(LossCase(s_q=4, s_kv=7, h=5))
    for name, x in changes.items():
        inputs[name] = x.astype(inputs[name].dtype) if name in inputs else x
    with pytest.raises(ArgumentError, match=words):
        run_loss(mla_cupy.indexer_warmup_loss, **inputs, head_sums=np.zeros((4, 7), np.float32))


def test_lengths_without_indices(numpy_backend: None) -> None:
    inputs = loss_inputs(CASE)
    with pytest.raises(ArgumentError, match="topk_length"):
        run_loss(mla_cupy.indexer_head_sums, q=inputs["q"], k=inputs["k"], topk_length=np.ones(4, np.int32))


test_is_caught, test_as_it_is = mutant_suite(
    "indexer_loss_head_sums",
    [partial(check_ranks, CASE, GENERIC, FLOAT32_ERROR)],
    {},
    [Mutant("what a token does not see is not cleared", "indexer_loss_head_sums", "seen ? ", "true ? ")],
)
