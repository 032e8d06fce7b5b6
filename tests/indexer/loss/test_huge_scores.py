"""Losses where scores of the attention, or of the indexer, are huge: as the oracle's, which has them in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.loss_cases import LossCase, loss_inputs, run_loss
from tests.support.sim_driver import simulated
from tests.support.sparse_loss_cases import SparseLossCase, sparse_loss_inputs

Array = np.ndarray[Any, Any]
#: log2 of the factors of the tokens' queries, or of their index weights.
EXPONENTS = np.array([0, 29, 30, 31, 33, 60, 100])
GENERIC, HOPPER, HEADS = "indexer_loss_generic_scores", "indexer_loss_sm90_scores", "indexer_loss_sm90_heads"
LISTS = "indexer_loss_sm90_list_scores"
CASES = [
    (HOPPER, LossCase(s_q=7, s_kv=130, h=2, h_i=2, d=128, d_i=64, causal=False)),
    (HEADS, LossCase(s_q=7, s_kv=130, h=2, h_i=2, d=128, d_i=64, d_v=128, causal=False, target="per_head")),
    (GENERIC, LossCase(s_q=7, s_kv=6, h=2, h_i=2, d=40, d_i=32, d_v=8, causal=False)),
    (GENERIC, LossCase(s_q=7, s_kv=6, h=2, h_i=2, d=40, d_i=32, causal=False, target="per_head")),
    (LISTS, SparseLossCase(s_q=7, s_kv=40, topk=70, h=2, h_i=2, d=128, d_i=64)),
    (GENERIC, SparseLossCase(s_q=7, s_kv=12, topk=7, h=2, h_i=2, d=40, d_i=32)),
]


def multiply(x: Array) -> Array:
    """Each token by its factor."""
    factors = np.exp2(EXPONENTS).reshape(-1, *(1,) * (x.ndim - 1))
    return (x.astype(np.float64) * factors).astype(x.dtype)


def without_duplicates(indices: Array) -> Array:
    """Of two that are the largest a log-sum-exp in float32 does not tell."""
    found = np.full_like(indices, -1)
    for row, of in zip(found, indices, strict=True):
        first = np.unique(of, return_index=True)[1]
        row[first] = of[first]
    return found


def check(got: tuple[Any, ...], exact: tuple[Any, ...]) -> None:
    """Each token's within 2 % of its largest number. What all tokens share is finite."""
    assert len(got) == len(exact)
    for number, (x, y) in enumerate(zip(got, exact, strict=True)):
        assert (x is None) == (y is None)
        if x is None:
            continue
        found, wanted = (np.asarray(of, np.float64) for of in (x, y))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted), err_msg=str(number))
        if len(wanted) == len(EXPONENTS):
            unit = np.abs(np.where(np.isfinite(wanted), wanted, 0)).max(
                axis=tuple(range(1, wanted.ndim)), keepdims=True
            )
            close = np.abs(found - wanted) <= 0.02 * unit + 1e-3
            assert (close | ~np.isfinite(wanted)).all(), (number, found[~close][:4], wanted[~close][:4])


@pytest.mark.settled
@pytest.mark.parametrize("huge", ["q", "weights"])
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=lambda x: getattr(x, "id", x))
def test_losses(kernel: str, case: LossCase | SparseLossCase, huge: str) -> None:
    if isinstance(case, LossCase):
        inputs, options = loss_inputs(case), case.options
        function, oracle = mla_cupy.indexer_warmup_loss, reference.indexer_warmup_loss
    else:
        inputs, options = sparse_loss_inputs(case), {"causal": case.causal}
        inputs["indices"] = without_duplicates(inputs["indices"])
        function, oracle = mla_cupy.indexer_sparse_loss, reference.indexer_sparse_loss
    inputs[huge] = multiply(inputs[huge])
    with simulated(2, (9, 0), mode="random"):
        got = run_loss(function, **inputs, **options, kernel=kernel)
    with np.errstate(all="ignore"):
        check(got, oracle(**inputs, **options))
