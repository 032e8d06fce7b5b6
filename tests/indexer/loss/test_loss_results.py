"""The groups of the losses' arguments, their results by name, and the scale that has no default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, LossResults, Packed, SparseLoss, WarmupLoss, reference
from mla_cupy.ops import OPERATIONS
from tests.support.loss_cases import LossCase, check_loss, loss_inputs
from tests.support.sparse_loss_cases import SparseLossCase, check_sparse_loss, sparse_loss_inputs

MOST_PARAMETERS = 24
SCALE = 192**-0.5
CASE = LossCase(d_v=16)
SPARSE = SparseLossCase()
Loss = Callable[..., WarmupLoss] | Callable[..., SparseLoss]
LOSSES: list[tuple[Loss, Callable[[], dict[str, Any]]]] = [
    (mla_cupy.indexer_warmup_loss, lambda: loss_inputs(CASE)),
    (mla_cupy.indexer_sparse_loss, lambda: sparse_loss_inputs(SPARSE)),
]
losses = pytest.mark.parametrize(("function", "inputs"), LOSSES, ids=["warmup", "sparse"])


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def test_results_have_names() -> None:
    """First calls and repeated ones return the same kind, which unpacks in the order of the outputs."""
    inputs = loss_inputs(CASE)
    for _ in range(2):
        found = mla_cupy.indexer_warmup_loss(**inputs, scale=SCALE)
        assert type(found) is WarmupLoss
        check_loss(found, reference.indexer_warmup_loss(**inputs, scale=SCALE))
    lists = sparse_loss_inputs(SPARSE)
    for _ in range(2):
        sparse = mla_cupy.indexer_sparse_loss(**lists, scale=SCALE)
        assert type(sparse) is SparseLoss
        check_sparse_loss(sparse, reference.indexer_sparse_loss(**lists, scale=SCALE))
    for name, kind in (("indexer_warmup_loss", WarmupLoss), ("indexer_sparse_loss", SparseLoss)):
        assert kind._fields == tuple(output.name for output in OPERATIONS[name].outputs)


@losses
def test_arrays_of_an_earlier_call_are_written_again(function: Loss, inputs: Callable[[], dict[str, Any]]) -> None:
    given = inputs()
    first = function(**given, scale=SCALE)
    wanted = [x.copy() for x in first]
    for x in first:
        x[...] = 7
    again = function(**given, scale=SCALE, results=LossResults(*first))
    for x, y, expected in zip(again, first, wanted, strict=True):
        assert x is y
        np.testing.assert_array_equal(x, expected)


@losses
def test_some_results_are_given(function: Loss, inputs: Callable[[], dict[str, Any]]) -> None:
    given = inputs()
    wide = np.zeros(given["index_k"].shape, np.float32)
    found = function(**given, scale=SCALE, results=LossResults(d_index_k=wide))
    assert found.d_index_k is wide
    assert wide.any()


def test_a_result_that_the_loss_has_not() -> None:
    out = np.zeros((5, 3, 16), np.float32)
    with pytest.raises(ArgumentError, match=r"^results\.out: got a value, expected none"):
        mla_cupy.indexer_sparse_loss(**sparse_loss_inputs(SPARSE), scale=SCALE, results=LossResults(out=out))


@losses
def test_what_is_no_group(function: Loss, inputs: Callable[[], dict[str, Any]]) -> None:
    given = inputs()
    tuple_of_results = function(**given, scale=SCALE)
    with pytest.raises(ArgumentError, match=r"^results: got a \w+Loss, expected mla_cupy.LossResults or None; pass"):
        function(**given, scale=SCALE, results=tuple_of_results)
    with pytest.raises(ArgumentError, match=r"^packed: got a tuple, expected mla_cupy.Packed or None; pass"):
        function(**given, scale=SCALE, packed=(np.zeros(2, np.int32),) * 2)


@losses
def test_scale_is_required(function: Loss, inputs: Callable[[], dict[str, Any]]) -> None:
    for missing in ({}, {"scale": None}):
        with pytest.raises(ArgumentError, match=r"^scale: got None, expected the model's softmax scale: 192\*\*-0\.5 "):
            function(**inputs(), **missing)
    assert inspect.signature(function).parameters["scale"].default is inspect.Parameter.empty


def test_causal_by_default() -> None:
    """Both stages are causal by default, and so are the sums of heads with indices and without."""
    packed = {"cu_seqlens_q": np.array([0, 2, 5], np.int32), "cu_seqlens_kv": np.array([0, 4, 9], np.int32)}
    inputs = loss_inputs(LossCase(sequences=((2, 4), (3, 5))))
    given = {name: x for name, x in inputs.items() if name not in packed} | {"packed": Packed(**packed)}
    indices = np.tile(np.arange(5, dtype=np.int32), (5, 1))
    main = {name: given[name] for name in ("q", "k", "packed")}
    calls: list[Callable[..., Any]] = [
        lambda **options: mla_cupy.indexer_warmup_loss(**given, scale=SCALE, **options).kl,
        lambda **options: mla_cupy.indexer_sparse_loss(**given, indices=indices, scale=SCALE, **options).kl,
        lambda **options: mla_cupy.indexer_head_sums(**main, scale=SCALE, **options),
        lambda **options: mla_cupy.indexer_head_sums(**main, indices=indices, scale=SCALE, **options),
    ]
    for call in calls:
        np.testing.assert_array_equal(call(), call(causal=True))
    np.testing.assert_allclose(calls[0](), calls[1](), atol=1e-6)


@pytest.mark.parametrize("name", ["indexer_warmup_loss", "indexer_sparse_loss", "indexer_head_sums"])
def test_parameters_are_few(name: str) -> None:
    """Scale comes first among those that are named."""
    parameters = inspect.signature(getattr(mla_cupy, name)).parameters.values()
    assert len(parameters) <= MOST_PARAMETERS
    assert next(x for x in parameters if x.kind is x.KEYWORD_ONLY).name == "scale"
