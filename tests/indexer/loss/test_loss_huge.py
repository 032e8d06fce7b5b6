"""The indexer's losses where scores are huge: a head with a huge log-sum-exp has no part, and disturbs no other.

Heads see powers of two, from 1 to what float32 holds, times small integers that the keys have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import reference
from tests.support.gpu import upload
from tests.support.loss_cases import TENSOR_CORE_ERROR, LossCase, loss_inputs, run_loss
from tests.support.sim_driver import simulated

Array = np.ndarray[Any, Any]

SIZES = (0, 3, 14, 27, 29, 32, 60, 119)
CASES = [
    ("indexer_loss_generic_scores", LossCase(s_q=3, s_kv=20, h=8, h_i=2)),
    ("indexer_loss_generic_scores", LossCase(s_q=3, s_kv=20, h=8, h_i=8, d_v=8, target="per_head")),
    ("indexer_loss_sm90_scores", LossCase(s_q=3, s_kv=140, h=8, h_i=4, d=128, d_i=64, lse=True)),
    ("indexer_loss_sm90_scores", LossCase(s_q=3, s_kv=140, h=8, h_i=4, d=128, d_i=64, d_v=128)),
    ("indexer_loss_sm90_scores", LossCase(s_q=3, s_kv=140, h=8, h_i=4, d=192, d_i=64)),
    ("indexer_loss_sm90_heads", LossCase(s_q=3, s_kv=140, h=8, h_i=8, d=128, d_i=64, d_v=128, target="per_head")),
]
LISTS = ["indexer_loss_generic_scores", "indexer_loss_sm90_list_scores"]


def huge_inputs(case: LossCase) -> dict[str, Array]:
    """The log-sum-exps, if passed, belong to these queries and keys."""
    inputs = loss_inputs(case)
    integers = np.random.default_rng(case.s_kv).integers(-3, 4, case.s_kv)
    integers[0] = 5
    inputs["q"][...] = 0
    inputs["q"][..., 0] = np.ldexp(1.0, SIZES)
    inputs["k"][...] = 0
    inputs["k"][:, 0] = integers
    if case.target == "per_head":  # the last ordinary target, with huge scores of the indexer
        inputs["weights"][:, 1] = 2.0**40
    if case.lse:
        inputs["lse"] = attention_of(case, inputs).attention_lse.astype(np.float32)
    return inputs


def attention_of(case: LossCase, inputs: dict[str, Array]) -> reference.WarmupLoss:
    some = {name: x for name, x in inputs.items() if name != "lse"}
    return reference.indexer_warmup_loss(**some | {"v": inputs["k"]}, **case.options, gradients=False)


def check(got: Any, exact: Any) -> None:
    for name in exact._fields:
        x, wanted = getattr(got, name), getattr(exact, name)
        assert (x is None) == (wanted is None), name
        if x is None:
            continue
        x, wanted = np.asarray(x.get() if hasattr(x, "get") else x, np.float64), np.asarray(wanted, np.float64)
        of_logarithms = name in ("mass", "index_lse", "attention_lse")
        size = 1.0 if of_logarithms else max(1.0 if name == "kl" else 1e-2, float(np.abs(wanted).max(initial=0)))
        bound = TENSOR_CORE_ERROR * size
        np.testing.assert_allclose(x, wanted, rtol=2.0**-7, atol=bound, err_msg=name)


def some_live(exact: Any) -> None:
    """The case tests something: of heads or rows, some have a divergence."""
    assert np.isfinite(exact.kl).all()
    assert (exact.kl != 0).any()


def run_warmup(kernel: str, case: LossCase, place: Any, prepare: Callable[[Array], Any] = np.asarray) -> None:
    inputs = huge_inputs(case)
    exact = reference.indexer_warmup_loss(**inputs, **case.options)
    some_live(exact)
    with place:
        given = {name: prepare(x) for name, x in inputs.items()}
        check(run_loss(mla_cupy.indexer_warmup_loss, **given, **case.options, kernel=kernel), exact)


def run_sparse(kernel: str, place: Any, prepare: Callable[[Array], Any] = np.asarray) -> None:
    inputs = huge_inputs(LossCase(s_q=3, s_kv=140, h=8, h_i=4, d=128, d_i=64, causal=False))
    inputs["indices"] = np.stack([np.random.default_rng(t).permutation(140)[:128] for t in range(3)]).astype(np.int32)
    exact = reference.indexer_sparse_loss(**inputs, causal=False)
    some_live(exact)
    with place:
        given = {name: prepare(x) for name, x in inputs.items()}
        check(run_loss(mla_cupy.indexer_sparse_loss, **given, causal=False, kernel=kernel), exact)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=str)
def test_warmup(kernel: str, case: LossCase) -> None:
    run_warmup(kernel, case, simulated(2, (9, 0), mode="random"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kernel", LISTS)
def test_sparse(kernel: str) -> None:
    run_sparse(kernel, simulated(2, (9, 0), mode="random"))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=str)
def test_warmup_on_a_gpu(hopper: object, kernel: str, case: LossCase) -> None:
    run_warmup(kernel, case, nullcontext(), upload)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", LISTS)
def test_sparse_on_a_gpu(hopper: object, kernel: str) -> None:
    run_sparse(kernel, nullcontext(), upload)
