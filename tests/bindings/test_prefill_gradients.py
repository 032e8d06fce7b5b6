"""Gradients of dense attention with keys and values per head, in PyTorch and in JAX, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import DTypeError
from tests.bindings.cases import Array, BoundCall, prefill
from tests.bindings.test_jax import both_roads, on_cpu
from tests.bindings.test_torch import tensors
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import flat

pytestmark = [
    pytest.mark.usefixtures("_numpy_backend"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
LEAVES = ("q", "k", "v", "q_rope", "k_rope")
CHANGES: list[dict[str, Any]] = [
    {"sequences": ((2, 3), (3, 3))},
    {"q_pair": True, "k_rope": "per_head", "causal": False},
    {"k_rope": "within", "starts": False, "d_qk": 128, "d_v": 128},
]
every_form = pytest.mark.parametrize("changes", CHANGES, ids=["shared", "pair", "within"])


def weights(call: BoundCall) -> Array:
    """Weights of `out` in a loss: numbers that fit 16 bits."""
    return np.linspace(-1, 1, call.arrays["v"].shape[2]).astype(call.arrays["q"].dtype).astype(np.float32)


def wanted(call: BoundCall, of_lse: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The public backward's gradients of that loss, and of a sum of lse."""
    out, lse = call.eager()
    dout = np.ascontiguousarray(np.broadcast_to(weights(call), out.shape)).astype(call.arrays["q"].dtype)
    dlse = np.where(np.isfinite(lse), np.float32(of_lse), 0).astype(np.float32) if of_lse else None
    given = {name: x for name, x in call.arrays.items() if not name.startswith("state")}
    found = flat(mla_cupy.mla_prefill_backward)(
        **given, out=out, dout=dout, lse=lse, dlse=dlse, **call.options, **changes
    )
    return dict(zip(LEAVES, found, strict=True))


# ---- PyTorch -----------------------------------------------------------------------------------------------------


def torch_loss(torch: Any, of_torch: Any, call: BoundCall) -> tuple[Callable[..., Any], tuple[Any, ...], list[str]]:
    """The loss by the tensors that have gradients, these, and their names."""
    given = tensors(torch, call)
    names = [name for name in LEAVES if name in given]
    factors = torch.from_numpy(weights(call))

    def loss(*leaves: Any) -> Any:
        out, lse = flat(of_torch.mla_prefill)(**{**given, **dict(zip(names, leaves, strict=True))}, **call.options)
        return (out.float() * factors).sum() + torch.where(lse.isfinite(), lse, 0).sum()

    return loss, tuple(given[name] for name in names), names


@every_form
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_torch(torch: Any, of_torch: Any, changes: dict[str, Any], compiled: bool) -> None:
    call = prefill(changes)
    loss, leaves, names = torch_loss(torch, of_torch, call)
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = tuple(x.requires_grad_() for x in leaves)
    loss(*leaves).backward()
    expected = wanted(call)
    for name, leaf in zip(names, leaves, strict=True):
        assert_same(array(torch, leaf.grad), expected[name])


def test_torch_transforms(torch: Any, of_torch: Any) -> None:
    loss, leaves, names = torch_loss(torch, of_torch, prefill(CHANGES[0]))
    every, expected = tuple(range(len(leaves))), wanted(prefill(CHANGES[0]))
    for got in (
        torch.func.grad(loss, every)(*leaves),
        torch.func.vjp(loss, *leaves)[1](torch.ones(())),
        [x[1] for x in torch.func.vmap(torch.func.grad(loss, every))(*(torch.stack([x, x]) for x in leaves))],
    ):
        for name, x in zip(names, got, strict=True):
            assert_same(array(torch, x), expected[name])


def test_torch_determinism_and_what_is_not_used(torch: Any, of_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward is deterministic where PyTorch is, and gets no gradient of an lse that nobody has used."""
    library = importlib.import_module("mla_cupy.torch.library")
    seen: list[Any] = []
    original = library.run_call
    monkeypatch.setattr(library, "run_call", lambda call: (seen.append(call), original(call))[1])
    for exactly in (False, True):
        given = tensors(torch, prefill())
        given["k"].requires_grad_()
        torch.use_deterministic_algorithms(exactly)
        try:
            flat(of_torch.mla_prefill)(**given)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert seen[-1].operation.name == "mla_prefill_backward"
        assert seen[-1].operation.options(*seen[-1].options).deterministic is exactly
        assert seen[-1].named["dlse"] is None


def test_torch_second_derivatives(torch: Any, of_torch: Any) -> None:
    loss, leaves, _ = torch_loss(torch, of_torch, prefill())
    q = leaves[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(q, *leaves[1:]), q, create_graph=True)
    with pytest.raises(DTypeError, match="mla_prefill_backward has no such gradient"):
        gradient.float().sum().backward()


def by_float64(torch: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Attention to all keys of one sequence in PyTorch's own operations."""
    q, k, v, k_rope = (given[name] for name in ("q", "k", "v", "k_rope"))
    keys = torch.cat([k, k_rope[:, None].expand(-1, k.shape[1], -1)], -1)
    scores = torch.einsum("qhd,khd->qhk", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_torch_chunks(torch: Any, of_torch: Any, compiled: bool) -> None:
    """A chunk after another by states: autograd goes back through all of them, as through the whole."""
    call = prefill({"sequences": ((3, 8),), "h_q": 2, "h_kv": 2, "starts": False, "causal": False})
    given = tensors(torch, call)
    leaves = {name: x.requires_grad_() for name, x in given.items()}

    def chunks(given: dict[str, Any]) -> Any:
        state: dict[str, Any] = {}
        for part in (slice(0, 3), slice(3, 5), slice(5, 8)):
            names = {name: given[name][part] for name in ("k", "v", "k_rope")}
            out, lse = flat(of_torch.mla_prefill)(given["q"], **names, causal=False, out_dtype=torch.float32, **state)
            state = {"state_out": out, "state_lse": lse}
        return (out * torch.linspace(-1, 1, 128)).sum() + lse.sum()

    torch._dynamo.reset()
    (torch.compile(chunks, backend="aot_eager") if compiled else chunks)(leaves).backward()
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    out, lse = by_float64(torch, wide)
    ((out * torch.linspace(-1, 1, 128)).sum() + lse.sum()).backward()
    for name, leaf in leaves.items():
        gap = (leaf.grad.double() - wide[name].grad).norm()
        assert gap < 0.02 * wide[name].grad.norm(), name


def test_torch_empty_state(torch: Any, of_torch: Any) -> None:
    """Its values, which may be anything, have no gradient, and nothing else changes."""
    call = prefill({"sequences": ((3, 3),), "starts": False})
    given = tensors(torch, call)
    s_q, h_q, _ = given["q"].shape
    state = torch.full((s_q, h_q, 128), torch.nan).requires_grad_(), torch.full((s_q, h_q), -torch.inf).requires_grad_()
    q = given["q"].requires_grad_()
    out, _ = flat(of_torch.mla_prefill)(**given, state_out=state[0], state_lse=state[1])
    (out.float() * torch.from_numpy(weights(call))).sum().backward()
    assert not state[0].grad.any()
    assert not state[1].grad.any()
    assert_same(array(torch, q.grad), wanted(call, 0.0)["q"])


def test_torch_state_alone(torch: Any, of_torch: Any) -> None:
    """Rows without a key return the state, whatever its lse."""
    q, k, v, state, lse = state_alone()
    leaves = torch.from_numpy(state).requires_grad_(), torch.from_numpy(lse).requires_grad_()
    given = (tensor(torch, x) for x in (q, k, v))
    out, _ = of_torch.mla_prefill(*given, state_out=leaves[0], state_lse=leaves[1])
    (out.float() * torch.linspace(-1, 1, 128)).sum().backward()
    assert leaves[0].grad.any()
    assert not leaves[1].grad.any()


def state_alone() -> tuple[Array, ...]:
    """Queries that come before all keys, and a state in float32."""
    rng = np.random.default_rng(0)
    q, k, v = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((3, 2, 192), (0, 2, 192), (0, 2, 128)))
    return q, k, v, rng.standard_normal((3, 2, 128), np.float32), rng.standard_normal((3, 2), np.float32)


# ---- JAX ---------------------------------------------------------------------------------------------------------


def jax_loss(jax: Any, of_jax: Any, call: BoundCall, exportable: bool, **options: Any) -> Any:
    rest = {name: x for name, x in on_cpu(jax, call).items() if name not in LEAVES}
    jnp = jax.numpy

    def value(leaves: dict[str, Any]) -> Any:
        out, lse = flat(of_jax.mla_prefill)(**leaves, **rest, **call.options, **options, exportable=exportable)
        return (out.astype(jnp.float32) * weights(call)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    return value


def jax_leaves(jax: Any, call: BoundCall) -> dict[str, Any]:
    return {name: x for name, x in on_cpu(jax, call).items() if name in LEAVES}


@every_form
@both_roads
def test_jax(jax: Any, of_jax: Any, changes: dict[str, Any], exportable: bool) -> None:
    call = prefill(changes)
    got = jax.jit(jax.grad(jax_loss(jax, of_jax, call, exportable, deterministic=True)))(jax_leaves(jax, call))
    expected = wanted(call)
    for name, gradient in got.items():
        assert_same(np.asarray(gradient), expected[name])


def test_jax_state_alone(jax: Any, of_jax: Any) -> None:
    q, k, v, state, lse = state_alone()

    def loss(state: Any, lse: Any) -> Any:
        out, _ = of_jax.mla_prefill(q, k, v, state_out=state, state_lse=lse)
        return (out.astype(np.float32) * np.linspace(-1, 1, 128)).sum()

    of_values, of_lse = jax.grad(loss, (0, 1))(state, lse)
    assert of_values.any()
    assert not of_lse.any()


def test_jax_chunks(jax: Any, of_jax: Any) -> None:
    """Through states, as through the whole."""
    call = prefill({"sequences": ((3, 8),), "h_q": 2, "h_kv": 2, "starts": False, "causal": False})

    def of(parts: tuple[slice, ...]) -> dict[str, Any]:
        def value(x: dict[str, Any]) -> Any:
            state: dict[str, Any] = {}
            for part in parts:
                keys = {name: x[name][part] for name in ("k", "v", "k_rope")}
                out, lse = flat(of_jax.mla_prefill)(x["q"], **keys, causal=False, out_dtype="float32", **state)
                state = {"state_out": out, "state_lse": lse}
            return (out * weights(call)).sum() + lse.sum()

        found: dict[str, Any] = jax.grad(value)(jax_leaves(jax, call))
        return found

    whole, pieces = of((slice(0, 8),)), of((slice(0, 3), slice(3, 5), slice(5, 8)))
    for name, gradient in whole.items():
        x, y = (np.asarray(one).astype(np.float64) for one in (gradient, pieces[name]))
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(x), name


@both_roads
def test_jax_heads_over_devices(jax: Any, of_jax: Any, exportable: bool) -> None:
    """The gradient of the columns that all heads share is the sum over the devices."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX has been started with one CPU device")
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(devices[:2]), ("heads",))
    call = prefill()
    heads, jnp = spec(None, "heads"), jax.numpy
    names = ("q", "k", "v", "k_rope", "cu_seqlens_q", "cu_seqlens_kv")
    sharded = shard_map(
        lambda *x: flat(of_jax.mla_prefill)(**dict(zip(names, x, strict=True)), exportable=exportable),
        mesh=mesh,
        in_specs=(heads, heads, heads, spec(), spec(), spec()),
        out_specs=(heads, heads),
    )

    def loss(leaves: dict[str, Any]) -> Any:
        out, lse = sharded(*({**call.arrays, **leaves}[name] for name in names))
        return (out.astype(jnp.float32) * weights(call)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    leaves = {name: x for name, x in call.arrays.items() if name in LEAVES}
    got, expected = jax.jit(jax.grad(loss))(leaves), wanted(call)
    for name in ("q", "k", "v"):
        assert_same(np.asarray(got[name]), expected[name])
    gap = np.linalg.norm(np.asarray(got["k_rope"], np.float64) - expected["k_rope"].astype(np.float64))
    assert gap < 0.01 * np.linalg.norm(expected["k_rope"].astype(np.float64))  # a sum of two rounded ones


# ---- No gradient with a mask --------------------------------------------------------------------------------------


def test_torch_with_a_mask(torch: Any, of_torch: Any) -> None:
    """It is refused in the call; beneath it, by the operator's own gradient."""
    call = prefill({"mask": 0.5})
    given = tensors(torch, call)
    given["v"].requires_grad_()
    with pytest.raises(DTypeError, match="mla_prefill with a mask has no such gradient"):
        flat(of_torch.mla_prefill)(**given, **call.options)
    with torch.no_grad():
        flat(of_torch.mla_prefill)(**given, **call.options)
    out, _ = torch.ops.mla_cupy.mla_prefill(**given, **call.options)
    with pytest.raises(DTypeError, match="mla_prefill with a mask has no such gradient"):
        out.sum().backward()


def test_jax_with_a_mask(jax: Any, of_jax: Any) -> None:
    call = prefill({"mask": 0.5})
    given = on_cpu(jax, call)
    with pytest.raises(DTypeError, match="mla_prefill has no such gradient"):
        jax.grad(lambda v: flat(of_jax.mla_prefill)(**{**given, "v": v}, **call.options)[0].sum())(given["v"])
