"""`jax.shard_map` by its defaults: JAX keeps account of what varies over the devices, and sums gradients by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.bindings.cases import CALLS_OF_JAX, BoundCall, as_tuple, forward, prefill, sparse_loss, warmup_loss
from tests.support.flat import flat
from tests.support.loss_cases import LossCase
from tests.support.sparse_loss_cases import SparseLossCase

pytestmark = pytest.mark.usefixtures("_numpy_backend")

ONE_OF_EACH = list({call.operation: call for call in reversed(CALLS_OF_JAX)}.values())


def objective(call: BoundCall) -> BoundCall:
    """The differentiable scalar of a loss."""
    return replace(call, id=call.operation, operation=call.operation.replace("loss", "objective"))


#: A call of each differentiable function, and the arrays that it has gradients by.
DIFFERENTIABLE = [
    pytest.param(prefill({"k_rope": "shared"}), ("q", "k", "v", "k_rope"), id="mla_prefill"),
    pytest.param(forward({"sink": True}), ("q", "kv", "attn_sink"), id="sparse_mla_forward"),
    pytest.param(objective(warmup_loss(LossCase())), ("index_q", "index_k", "weights"), id="warmup"),
    pytest.param(objective(sparse_loss(SparseLossCase())), ("index_q", "index_k", "weights"), id="sparse"),
]


@pytest.fixture
def mesh(jax: Any) -> Any:
    devices = jax.devices("cpu")
    if len(devices) < 2 or not hasattr(jax, "shard_map"):
        pytest.skip("JAX has one CPU device, or no account of what varies")
    return jax.sharding.Mesh(np.array(devices[:2]), ("x",))


def shared(jax: Any, mesh: Any, function: Callable[..., Any], varying: bool) -> Any:
    """The function on each device: of its first argument it has a part of the first axis."""
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(function, mesh=mesh, in_specs=(spec("x"), spec()), out_specs=spec("x") if varying else spec())


@pytest.mark.parametrize("call", ONE_OF_EACH, ids=lambda call: call.operation)
def test_results_vary(jax: Any, of_jax: Any, mesh: Any, call: BoundCall) -> None:
    """Results of a device's own arrays vary between devices."""
    name = call.record.names[0]
    twice = np.stack([call.arrays[name]] * 2)

    def run(x: Any, others: dict[str, Any]) -> Any:
        results = as_tuple(flat(getattr(of_jax, call.operation))(**{**others, name: x[0]}, **call.options))
        return [x[None] for x in results if x is not None]

    jax.eval_shape(shared(jax, mesh, run, varying=True), twice, call.arrays)
    with pytest.raises(ValueError, match=r"can't be statically inferred|replicated"):
        jax.eval_shape(shared(jax, mesh, run, varying=False), twice, call.arrays)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [0, 2], ids=["once", "scan"])
@pytest.mark.parametrize(("call", "leaves"), DIFFERENTIABLE)
def test_gradients(jax: Any, of_jax: Any, mesh: Any, call: BoundCall, leaves: tuple[str, ...], steps: int) -> None:
    """Gradients by a device's own arrays, and by shared arrays: the latter are sums over the devices."""
    own, *replicated = leaves
    jnp = jax.numpy
    given = {name: jnp.asarray(x) for name, x in call.arrays.items()}
    parts = jnp.stack([given[own], given[own] / 2])

    def once(x: Any, others: dict[str, Any]) -> Any:
        first = as_tuple(flat(getattr(of_jax, call.operation))(**{**given, **others, own: x}, **call.options))[0]
        return jnp.square(first.astype(jnp.float32)).sum()

    def loss(x: Any, others: dict[str, Any]) -> Any:
        if not steps:
            return once(x, others)
        start = jnp.zeros(()) + 0 * x.astype(jnp.float32).sum()  # varies like the added value
        return jax.lax.scan(lambda total, _: (total + once(x, others), None), start, length=steps)[0]

    def over_devices(parts: Any, others: dict[str, Any]) -> Any:
        return shared(jax, mesh, lambda x, others: jax.lax.psum(loss(x[0], others), "x"), varying=False)(parts, others)

    def one_by_one(parts: Any, others: dict[str, Any]) -> Any:
        return loss(parts[0], others) + loss(parts[1], others)

    others = {name: given[name] for name in replicated}
    got = jax.jit(jax.grad(over_devices, (0, 1)))(parts, others)
    wanted = jax.jit(jax.grad(one_by_one, (0, 1)))(parts, others)
    for x, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, expected = (np.asarray(y).astype(np.float64) for y in (x, expected))
        assert np.linalg.norm(expected) > 0
        assert np.linalg.norm(x - expected) < 0.01 * np.linalg.norm(expected)  # sums of numbers of 16 bits
