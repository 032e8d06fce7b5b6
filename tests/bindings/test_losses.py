"""The losses as differentiable scalars, in JAX and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError, ShapeError
from tests.interop.test_torch import array, tensor
from tests.support.loss_cases import LossCase, loss_inputs, run_loss
from tests.support.sparse_loss_cases import SparseLossCase, sparse_loss_inputs

pytestmark = pytest.mark.usefixtures("_numpy_backend")

LEAVES = ("index_q", "index_k", "weights")
CASES = [LossCase(weights="bfloat16"), LossCase(h_i=3, target="per_head", row_weights=False)]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def expected(case: LossCase, factor: float) -> tuple[Any, ...]:
    """The objective, and the gradients times a factor that bfloat16 does not round."""
    inputs = loss_inputs(case)
    kl, _, _, *gradients, _, _ = run_loss(mla_cupy.indexer_warmup_loss, **inputs, **case.options)
    factors = inputs.get("row_weights", np.ones(case.s_q, np.float32))
    total = (kl * factors.reshape(-1, *[1] * (kl.ndim - 1))).sum()
    own = [x.astype(inputs[name].dtype) for name, x in zip(LEAVES, gradients, strict=True)]
    return total, [factor * x.astype(np.float32) for x in own]


CODES = LossCase(h=4, d=72, h_kv=2, pairs="qk", codes="uint8", lse=True)


def of_codes() -> tuple[dict[str, Any], dict[str, Any], Any, list[Any]]:
    """The arrays of a call in FP8 but for the weights; what takes its gradients; and its objective and gradients."""
    inputs = loss_inputs(CODES)
    total, _ = expected(CODES, 1)
    gradients = run_loss(mla_cupy.indexer_warmup_loss, **inputs)[3:6]
    shapes = {name: inputs[name].shape for name in LEAVES[:2]}
    leaves: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return inputs, {**leaves, "weights": inputs.pop("weights")}, total, [4 * x.astype(np.float32) for x in gradients]


def test_codes_in_jax(jax: Any, of_jax: Any) -> None:
    """The gradients by codes go to what they stand for; without it, only weights have one."""
    inputs, leaves, total, gradients = of_codes()
    inputs = {name: jax.numpy.asarray(x) for name, x in inputs.items()}

    def value(leaves: Any, through: bool = True) -> Any:
        straight = (leaves["index_q"], leaves["index_k"]) if through else None
        given = {**inputs, "weights": leaves["weights"]}
        return 4 * run_loss(of_jax.indexer_warmup_objective, **given, straight_through=straight)[0]

    assert float(value(leaves)) == pytest.approx(4 * float(total), rel=1e-6)
    found = jax.grad(value)(leaves)
    for name, wanted in zip(LEAVES, gradients, strict=True):
        np.testing.assert_array_equal(np.asarray(found[name]), wanted)
    alone = jax.grad(lambda x: value(x, through=False))(leaves)
    np.testing.assert_array_equal(np.asarray(alone["weights"]), gradients[2])
    with pytest.raises(ShapeError, match="straight_through, of index_q,: got"):
        value({**leaves, "index_q": leaves["index_q"][1:]})


def test_codes_in_torch(torch: Any, of_torch: Any) -> None:
    inputs, leaves, total, gradients = of_codes()
    given = {name: tensor(torch, x) for name, x in inputs.items()}
    own = {name: tensor(torch, x).requires_grad_() for name, x in leaves.items()}
    for straight in ((own["index_q"], own["index_k"]), None):
        own["weights"].grad = None
        loss, _ = run_loss(
            of_torch.indexer_warmup_objective, **given, weights=own["weights"], straight_through=straight
        )
        assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
        (4 * loss).backward()
        np.testing.assert_array_equal(array(torch, own["weights"].grad), gradients[2])
    for name, wanted in zip(LEAVES, gradients, strict=True):
        np.testing.assert_array_equal(array(torch, own[name].grad), wanted)
    with pytest.raises(ShapeError, match="straight_through, of index_q,: got"):
        run_loss(
            of_torch.indexer_warmup_objective, **given, weights=own["weights"], straight_through=(own["index_k"],) * 2
        )


@cases
@pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
def test_jax(jax: Any, of_jax: Any, case: LossCase, exportable: bool) -> None:
    inputs = {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in loss_inputs(case).items()}
    leaves = {name: inputs.pop(name) for name in LEAVES}

    def value(leaves: dict[str, Any]) -> Any:
        loss, kl = run_loss(of_jax.indexer_warmup_objective, **leaves, **inputs, **case.options, exportable=exportable)
        return 4 * loss + jax.lax.stop_gradient(kl).sum()

    total, gradients = expected(case, 4)
    plain, _ = run_loss(of_jax.indexer_warmup_objective, **leaves, **inputs, **case.options, exportable=exportable)
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
        plain, _ = run_loss(of_torch.indexer_warmup_objective, **inputs, **case.options)
    assert not plain.requires_grad

    def value(inputs: dict[str, Any]) -> Any:
        return run_loss(of_torch.indexer_warmup_objective, **inputs, **case.options)

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
PACKED = LossCase(sequences=((2, 4), (3, 5)))
STARTS = ("cu_seqlens_q", "cu_seqlens_kv")


def expected_sparse(factor: float) -> tuple[Any, ...]:
    inputs = sparse_loss_inputs(SPARSE)
    kl, _, _, *gradients = run_loss(mla_cupy.indexer_sparse_loss, **inputs)
    return (kl * inputs["row_weights"]).sum(), [factor * x.astype(np.float32) for x in gradients]


@pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
def test_sparse_jax(jax: Any, of_jax: Any, exportable: bool) -> None:
    inputs = {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in sparse_loss_inputs(SPARSE).items()}
    leaves = {name: inputs.pop(name) for name in LEAVES}

    def value(leaves: dict[str, Any]) -> Any:
        return 4 * run_loss(of_jax.indexer_sparse_objective, **leaves, **inputs, exportable=exportable)[0]

    total, gradients = expected_sparse(4)
    plain, _ = run_loss(of_jax.indexer_sparse_objective, **leaves, **inputs, exportable=exportable)
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
    loss, kl = run_loss(of_torch.indexer_sparse_objective, **inputs)
    assert not kl.requires_grad
    assert float(loss.detach()) == pytest.approx(float(total), rel=1e-6)
    (4 * loss).backward()
    for name, wanted in zip(LEAVES, gradients, strict=True):
        np.testing.assert_array_equal(array(torch, inputs[name].grad).astype(np.float32), wanted)


# ---- Groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_groups_in_torch(torch: Any, of_torch: Any, compiled: bool) -> None:
    """Sequences in a group; results by name, into the tensors of an earlier call."""
    given = {name: tensor(torch, x) for name, x in loss_inputs(PACKED).items()}
    starts = {name: given.pop(name) for name in STARTS}
    wanted = run_loss(mla_cupy.indexer_warmup_loss, **loss_inputs(PACKED))

    def loss(given: dict[str, Any], starts: dict[str, Any], earlier: Any = None) -> Any:
        results = None if earlier is None else mla_cupy.LossResults(*earlier)
        packed = mla_cupy.Packed(**starts)
        return of_torch.indexer_warmup_loss(**given, scale=PACKED.d**-0.5, packed=packed, results=results)

    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    with torch.no_grad():
        first = run(given, starts)
        again = run(given, starts, [torch.full_like(x, 7) if x is not None else None for x in first])
    for found in (first, again):
        assert type(found) is mla_cupy.WarmupLoss
        for name, x in found._asdict().items():
            expected = getattr(wanted, name)
            assert (x is None) == (expected is None)
            if x is not None:
                np.testing.assert_array_equal(array(torch, x), expected)


@pytest.mark.parametrize("exportable", [False, True], ids=["callback", "handler"])
def test_groups_in_jax(jax: Any, of_jax: Any, exportable: bool) -> None:
    """Sequences in a group; results by name, in donated memory."""
    given = {name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in loss_inputs(PACKED).items()}
    starts = {name: given.pop(name) for name in STARTS}
    wanted = run_loss(mla_cupy.indexer_warmup_loss, **loss_inputs(PACKED))

    def loss(given: dict[str, Any], starts: dict[str, Any], kl: Any) -> Any:
        groups = {"packed": mla_cupy.Packed(**starts), "results": mla_cupy.LossResults(kl=kl)}
        return of_jax.indexer_warmup_loss(**given, scale=PACKED.d**-0.5, **groups, exportable=exportable)

    memory = jax.numpy.full(wanted.kl.shape, 7, np.float32)
    place = memory.unsafe_buffer_pointer()
    found = jax.jit(loss, donate_argnums=2)(given, starts, memory)
    assert type(found) is mla_cupy.WarmupLoss
    assert found.kl.unsafe_buffer_pointer() == place
    for name, x in found._asdict().items():
        expected = getattr(wanted, name)
        assert (x is None) == (expected is None)
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x), expected)


# ---- Under transforms --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:There is a performance drop")  # what PyTorch itself does
def test_torch_func(torch: Any, of_torch: Any) -> None:
    """Gradients as autograd's, beneath vmap, too; what else is differentiated raises."""
    inputs = {name: tensor(torch, x) for name, x in sparse_loss_inputs(SPARSE).items()}
    _, gradients = expected_sparse(4)
    leaves = tuple(inputs.pop(name) for name in LEAVES)

    def value(*leaves: Any, of_kl: float = 0) -> Any:
        loss, kl = run_loss(of_torch.indexer_sparse_objective, **dict(zip(LEAVES, leaves, strict=True)), **inputs)
        return 4 * loss + of_kl * kl.sum() if of_kl else 4 * loss

    def check(got: Any) -> None:
        for x, wanted in zip(got, gradients, strict=True):
            np.testing.assert_array_equal(array(torch, x).astype(np.float32), wanted)

    check(torch.func.grad(value, (0, 1, 2))(*leaves))
    twice = [torch.stack([x, x]) for x in leaves]
    check(x[1] for x in torch.func.vmap(torch.func.grad(value, (0, 1, 2)))(*twice))
    check(x[1] for x in torch.func.grad(lambda *x: torch.func.vmap(value)(*x).sum(), (0, 1, 2))(*twice))
    with pytest.raises(DTypeError, match=r"^kl: got a derivative"):
        torch.func.grad(value)(*leaves, of_kl=1)
    with pytest.raises(DTypeError, match=r"^index_q: got a derivative"):
        torch.func.jvp(value, leaves, leaves)


SECOND: dict[str, Callable[[Any, Callable[..., Any], Any], Any]] = {
    "jacrev": lambda torch, f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    "grad": lambda torch, f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x),
    "hessian": lambda torch, f, x: torch.func.hessian(f)(x),
    "jvp": lambda torch, f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
    "functional": lambda torch, f, x: torch.autograd.functional.hessian(f, x),
    "linear": lambda torch, f, x: twice_by_autograd(torch, f, x),
    "square": lambda torch, f, x: twice_by_autograd(torch, lambda x: f(x) ** 2, x),
    "beside": lambda torch, f, x: twice_by_autograd(torch, lambda x: f(x) + x.square().sum(), x),
}


def twice_by_autograd(torch: Any, function: Callable[..., Any], x: Any) -> Any:
    """The first derivative of a double backward is right."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    assert torch.equal(first, torch.func.grad(function)(x))
    return torch.autograd.grad(first.sum(), x)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:There is a performance drop")
@pytest.mark.parametrize("how", SECOND)
@pytest.mark.parametrize("loss", ["warmup", "sparse"])
def test_second_derivatives(torch: Any, of_torch: Any, loss: str, how: str) -> None:
    """They raise. A product of gradients and a cotangent would have some by the cotangent alone."""
    arrays = loss_inputs(CASES[0]) if loss == "warmup" else sparse_loss_inputs(SPARSE)
    inputs = {name: tensor(torch, x) for name, x in arrays.items()}
    function = getattr(of_torch, f"indexer_{loss}_objective")
    x = inputs.pop("weights").float()
    with pytest.raises(DTypeError, match="an indexer's objective has no such gradient"):
        SECOND[how](torch, lambda x: run_loss(function, **inputs, weights=x)[0], x)


def test_second_derivatives_in_jax(jax: Any, of_jax: Any) -> None:
    inputs = {name: jax.numpy.asarray(x) for name, x in sparse_loss_inputs(SPARSE).items()}

    def loss(x: Any) -> Any:
        return run_loss(of_jax.indexer_sparse_objective, **{**inputs, "weights": x})[0] ** 2

    x = inputs["weights"]
    with pytest.raises(DTypeError, match="indexer_sparse_loss has no such gradient"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)


def test_jax_does_not_differentiate_kl(jax: Any, of_jax: Any) -> None:
    inputs = {name: jax.numpy.asarray(x) for name, x in sparse_loss_inputs(SPARSE).items()}
    with pytest.raises(DTypeError, match=r"^kl: got a derivative"):
        jax.grad(lambda x: run_loss(of_jax.indexer_sparse_objective, **{**inputs, "index_q": x})[1].sum())(
            inputs["index_q"]
        )


def test_a_teacher_may_require_grad(torch: Any, of_torch: Any) -> None:
    """Everything but the index queries, keys and weights counts as a constant."""
    inputs = {name: tensor(torch, x) for name, x in sparse_loss_inputs(SPARSE).items()}
    total, _ = expected_sparse(1)
    for name in ("q", "k", "lse", "row_weights"):
        inputs[name].requires_grad_()
    assert float(run_loss(of_torch.indexer_sparse_objective, **inputs)[0]) == pytest.approx(float(total), rel=1e-6)
