"""The losses as differentiable scalars, in JAX and in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from tests.interop.test_torch import array, tensor
from tests.support.loss_cases import LossCase, loss_inputs
from tests.support.sparse_loss_cases import SparseLossCase, sparse_loss_inputs

pytestmark = pytest.mark.usefixtures("_numpy_backend")

LEAVES = ("index_q", "index_k", "weights")
CASES = [LossCase(weights="bfloat16"), LossCase(h_i=3, target="per_head", row_weights=False)]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def expected(case: LossCase, factor: float) -> tuple[Any, ...]:
    """The objective, and the gradients times a factor that bfloat16 does not round."""
    inputs = loss_inputs(case)
    kl, _, _, *gradients, _, _ = mla_cupy.indexer_warmup_loss(**inputs, **case.options)
    factors = inputs.get("row_weights", np.ones(case.s_q, np.float32))
    total = (kl * factors.reshape(-1, *[1] * (kl.ndim - 1))).sum()
    own = [x.astype(inputs[name].dtype) for name, x in zip(LEAVES, gradients, strict=True)]
    return total, [factor * x.astype(np.float32) for x in own]


@cases
@pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
def test_jax(jax: Any, of_jax: Any, case: LossCase, exportable: bool) -> None:
    inputs = {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in loss_inputs(case).items()}
    leaves = {name: inputs.pop(name) for name in LEAVES}

    def value(leaves: dict[str, Any]) -> Any:
        loss, kl = of_jax.indexer_warmup_objective(**leaves, **inputs, **case.options, exportable=exportable)
        return 4 * loss + kl.sum()  # kl has no gradient

    total, gradients = expected(case, 4)
    plain, _ = of_jax.indexer_warmup_objective(**leaves, **inputs, **case.options, exportable=exportable)
    assert float(plain) == pytest.approx(float(total), rel=1e-6)
    for name, wanted in zip(LEAVES, gradients, strict=True):
        got = jax.jit(jax.grad(value))(leaves)[name]
        assert got.dtype == leaves[name].dtype
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), wanted)


@cases
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_torch(torch: Any, of_torch: Any, case: LossCase, compiled: bool) -> None:
    inputs = {name: tensor(torch, x) for name, x in loss_inputs(case).items()}
    total, gradients = expected(case, 4)
    with torch.no_grad():
        plain, _ = of_torch.indexer_warmup_objective(**inputs, **case.options)
    assert not plain.requires_grad

    def value(inputs: dict[str, Any]) -> Any:
        return of_torch.indexer_warmup_objective(**inputs, **case.options)

    for name in LEAVES:
        inputs[name].requires_grad_()
    loss, kl = (torch.compile(value, backend="aot_eager", fullgraph=True) if compiled else value)(inputs)
    assert not kl.requires_grad
    assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
    (4 * loss).backward()
    for name, wanted in zip(LEAVES, gradients, strict=True):
        got = inputs[name].grad
        assert got.dtype == inputs[name].dtype
        np.testing.assert_array_equal(array(torch, got).astype(np.float32), wanted)


SPARSE = SparseLossCase(lse=True, lengths=True)


def expected_sparse(factor: float) -> tuple[Any, ...]:
    inputs = sparse_loss_inputs(SPARSE)
    kl, _, _, *gradients = mla_cupy.indexer_sparse_loss(**inputs)
    return (kl * inputs["row_weights"]).sum(), [factor * x.astype(np.float32) for x in gradients]


@pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
def test_sparse_jax(jax: Any, of_jax: Any, exportable: bool) -> None:
    inputs = {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in sparse_loss_inputs(SPARSE).items()}
    leaves = {name: inputs.pop(name) for name in LEAVES}

    def value(leaves: dict[str, Any]) -> Any:
        loss, kl = of_jax.indexer_sparse_objective(**leaves, **inputs, exportable=exportable)
        return 4 * loss + kl.sum()  # kl has no gradient

    total, gradients = expected_sparse(4)
    plain, _ = of_jax.indexer_sparse_objective(**leaves, **inputs, exportable=exportable)
    assert float(plain) == pytest.approx(float(total), rel=1e-6)
    found = jax.jit(jax.grad(value))(leaves)
    for name, wanted in zip(LEAVES, gradients, strict=True):
        assert found[name].dtype == leaves[name].dtype
        np.testing.assert_array_equal(np.asarray(found[name]).astype(np.float32), wanted)


def test_sparse_torch(torch: Any, of_torch: Any) -> None:
    inputs = {name: tensor(torch, x) for name, x in sparse_loss_inputs(SPARSE).items()}
    total, gradients = expected_sparse(4)
    for name in LEAVES:
        inputs[name].requires_grad_()
    loss, kl = of_torch.indexer_sparse_objective(**inputs)
    assert not kl.requires_grad
    assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
    (4 * loss).backward()
    for name, wanted in zip(LEAVES, gradients, strict=True):
        np.testing.assert_array_equal(array(torch, inputs[name].grad).astype(np.float32), wanted)
