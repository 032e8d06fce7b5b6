"""Calls of `mla_cupy.jax` on sharded arrays, on the CPU: devices divide them, and gather nothing that they divide."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.bindings.cases import BoundCall, as_tuple, decode, every_call_of_jax, prefill
from tests.support.calls import assert_same
from tests.support.flat import flat

pytestmark = pytest.mark.usefixtures("_numpy_backend")

_MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter|dynamic-slice)[\w.-]*\(")
KINDS = ("Auto", "Explicit")
both_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def sharding(jax: Any) -> Any:
    """`mla_cupy.jax.sharding`, where JAX partitions with Shardy and has four devices."""
    if len(jax.devices("cpu")) < 4:
        pytest.skip("JAX has been started with fewer than four CPU devices")
    if not hasattr(jax.sharding, "AxisType") or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        pytest.skip("JAX has no Shardy")
    return importlib.import_module("mla_cupy.jax.sharding")


def mesh_of(jax: Any, kind: str, **sizes: int) -> Any:
    devices = np.array(jax.devices("cpu")[: int(np.prod(list(sizes.values())))])
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
    return jax.sharding.Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=kinds)


def put(jax: Any, mesh: Any, arrays: Mapping[str, Any], specs: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Arrays on a mesh; those without a spec are whole on every device."""
    spec = jax.sharding.PartitionSpec
    kinds = {name: jax.sharding.NamedSharding(mesh, spec(*specs.get(name, ()))) for name in arrays}
    return {name: jax.device_put(x, kinds[name]) for name, x in arrays.items()}


def moves(jax: Any, function: Any, *given: Any) -> set[str]:
    """Data that devices of the compiled program exchange, or cut from their parts."""
    return set(_MOVES.findall(jax.jit(function).lower(*given).compile().as_text()))


def close(got: Any, wanted: tuple[Any, ...], sums: tuple[bool, ...] = ()) -> None:
    """Equal, but for sums of rounded parts."""
    got = [x for x in as_tuple(got) if x is not None]
    wanted = tuple(x for x in wanted if x is not None)
    for x, expected, summed in zip(got, wanted, sums or (False,) * len(wanted), strict=True):
        x, expected = np.asarray(x), np.asarray(expected)
        if not summed:
            assert_same(x, expected)
            continue
        a, b = x.astype(np.float64), expected.astype(np.float64)
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)


@pytest.mark.one_in(8)
@every_call_of_jax
@both_kinds
def test_along_each_axis(jax: Any, of_jax: Any, sharding: Any, call: BoundCall, kind: str) -> None:
    """Every axis of every operation that devices may divide: they exchange nothing but sums."""
    lowering = importlib.import_module("mla_cupy.jax.lowering")
    arrays = {name: call.arrays[name] for name in call.record.names if name in call.arrays}
    parts = lowering._parts(lowering.signature_of(call.record, jax.tree.map(jax.numpy.asarray, arrays), call.options))
    for axis in call.record.parallel:
        count = next((n for n in (2, 3) if parts.most(axis) % n == 0), 1)
        if count == 1 or not any(axis in names for names in parts.names):  # packed queries have no axis of sequences
            continue
        mesh = mesh_of(jax, kind, x=count)
        specs = {
            name: tuple("x" if each == axis else None for each in names)
            for name, names in zip(arrays, parts.names, strict=False)
        }
        given = put(jax, mesh, arrays, specs)

        def run(given: dict[str, Any]) -> Any:
            return flat(getattr(of_jax, call.operation))(**given, **call.options)

        made = parts.names[-parts.results :]
        summed = tuple(axis not in names for names in made)
        assert moves(jax, run, given) == ({"all-reduce"} if any(summed) else set()), axis
        got = jax.jit(run)(given)
        close(got, call.eager(), summed)
        for x, names in zip((x for x in as_tuple(got) if x is not None), made, strict=True):
            assert x.sharding.shard_shape(x.shape) == tuple(
                size // count if each == axis else size for size, each in zip(x.shape, names, strict=True)
            )


def test_what_is_divided() -> None:
    """Along sequences and heads, as the issue says; the cache and its updates are not."""
    from mla_cupy.ops import BOUND_OPERATIONS

    assert set(BOUND_OPERATIONS["mla_decode"].parallel) == {"b", "h_q"}
    assert not BOUND_OPERATIONS["cache_append"].parallel
    for operation in BOUND_OPERATIONS.values():
        axes = {name.removesuffix("?") for array in operation.inputs for name in array.axes.split()}
        for lead, others in operation.parallel.items():
            assert {lead, *(name.removesuffix("?") for name in others)} <= axes, operation.name
            assert not any(array.written for array in operation.inputs), operation.name


Q, TABLE, LENGTHS = ("b", None, "h"), ("b",), ("b",)
BATCH = {"q": Q, "block_table": TABLE, "seqlens": LENGTHS}


def four(h_q: int = 4) -> BoundCall:
    """Decode of four sequences."""
    call = decode(h_q)
    arrays = {name: np.concatenate([x, x[:1]]) if name in BATCH else x for name, x in call.arrays.items()}
    return BoundCall(call.id, call.operation, arrays, call.options)


@both_kinds
def test_sequences_and_heads(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    """Over a mesh of two by two, inside a larger program; under its own sharding the cache is not touched."""
    call, mesh = four(), mesh_of(jax, kind, b=2, h=2)
    given = put(jax, mesh, call.arrays, BATCH)

    def step(given: dict[str, Any]) -> Any:
        out, lse = flat(of_jax.mla_decode)(**{**given, "q": given["q"] * 1})
        return out * 1, lse

    assert moves(jax, step, given) == set()
    out, lse = jax.jit(step)(given)
    close((out, lse), call.eager())
    assert out.sharding.shard_shape(out.shape) == (2, 2, 2, 512)
    assert lse.sharding.shard_shape(lse.shape) == (2, 2, 2)


def test_queries_say_how(jax: Any, of_jax: Any, sharding: Any) -> None:
    """Tables and lengths that are whole are cut; heads over two axes of the mesh."""
    call, mesh = four(), mesh_of(jax, "Auto", b=2, h=2)
    given = put(jax, mesh, call.arrays, {"q": Q})
    assert moves(jax, lambda x: flat(of_jax.mla_decode)(**x), given) <= {"dynamic-slice"}
    close(jax.jit(lambda x: flat(of_jax.mla_decode)(**x))(given), call.eager())
    given = put(jax, mesh, call.arrays, {"q": (None, None, ("b", "h"))})
    assert moves(jax, lambda x: flat(of_jax.mla_decode)(**x), given) == set()
    close(jax.jit(lambda x: flat(of_jax.mla_decode)(**x))(given), call.eager())


@both_kinds
def test_what_cannot_be_divided_is_gathered(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    """A cache over its pages, and four heads over three devices."""
    call, mesh = four(), mesh_of(jax, kind, b=2, h=2)
    arrays = dict(call.arrays)
    pages = len(arrays["kv_cache"]) % 2
    arrays["kv_cache"] = np.concatenate([arrays["kv_cache"], arrays["kv_cache"][:pages]])
    given = put(jax, mesh, arrays, {**BATCH, "kv_cache": ("b",)})
    assert "all-gather" in moves(jax, lambda x: flat(of_jax.mla_decode)(**x), given)
    close(jax.jit(lambda x: flat(of_jax.mla_decode)(**x))(given), call.eager())
    if kind == "Auto":
        mesh = mesh_of(jax, kind, h=3)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "h"))

        def run(given: dict[str, Any]) -> Any:
            q = jax.lax.with_sharding_constraint(given["q"], whole)
            return flat(of_jax.mla_decode)(**{**given, "q": q})

        close(jax.jit(run)(put(jax, mesh, arrays, {})), call.eager())


@both_kinds
def test_outside_jit(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    call, mesh = four(), mesh_of(jax, kind, b=2, h=2)
    out, lse = flat(of_jax.mla_decode)(**put(jax, mesh, call.arrays, BATCH))
    close((out, lse), call.eager())
    assert out.sharding.shard_shape(out.shape) == (2, 2, 2, 512)


@both_kinds
def test_vmap(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    """One call after the other, each divided."""
    call, mesh = four(), mesh_of(jax, kind, h=2)
    given = put(jax, mesh, call.arrays, {"q": (None, None, "h")})
    q = given["q"]
    run = jax.vmap(lambda q: flat(of_jax.mla_decode)(**{**given, "q": q}))
    out, lse = jax.jit(lambda q: run(jax.numpy.stack([q, q])))(q)
    for part in range(2):
        close((out[part], lse[part]), call.eager())


@both_kinds
def test_gradients(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    """Heads over two devices: what all heads share is summed, and nothing else moves."""
    call, mesh, jnp = prefill(), mesh_of(jax, kind, h=2), jax.numpy
    heads = (None, "h")
    leaves = {name: call.arrays[name] for name in ("q", "k", "v", "k_rope")}
    starts = {name: x for name, x in call.arrays.items() if name not in leaves}

    def loss(leaves: dict[str, Any]) -> Any:
        out, lse = flat(of_jax.mla_prefill)(**leaves, **starts, **call.options)
        return jnp.square(out.astype(jnp.float32)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    gradient = jax.value_and_grad(loss)
    given = put(jax, mesh, leaves, dict.fromkeys(("q", "k", "v"), heads))
    assert moves(jax, gradient, given) == {"all-reduce"}
    value, got = jax.jit(gradient)(given)
    expected_value, expected = jax.jit(gradient)(jax.tree.map(jnp.asarray, leaves))
    assert float(value) == pytest.approx(float(expected_value), rel=1e-5)
    close(tuple(got.values()), tuple(expected.values()), tuple(name == "k_rope" for name in got))


@pytest.mark.parametrize("whole", [True, False])
def test_beneath_shard_map(jax: Any, of_jax: Any, sharding: Any, whole: bool) -> None:
    """Over all axes of the mesh, and over one of two: then the other one's devices have the same."""
    call, mesh, spec = four(), mesh_of(jax, "Auto", b=2, h=2), jax.sharding.PartitionSpec
    names = list(call.arrays)
    q, b = (spec("b", None, "h"), spec("b")) if whole else (spec("b"), spec("b"))
    specs = {"q": q, "block_table": b, "seqlens": b}
    run = jax.shard_map(
        lambda *x: flat(of_jax.mla_decode)(**dict(zip(names, x, strict=True))),
        mesh=mesh,
        axis_names={"b", "h"} if whole else {"b"},
        in_specs=tuple(specs.get(name, spec()) for name in names),
        out_specs=(q, spec("b", "h") if whole else b),
        check_vma=False,
    )
    given = put(jax, mesh, call.arrays, BATCH)
    close(jax.jit(run)(*given.values()), call.eager())


@both_kinds
def test_exportable_calls(jax: Any, of_jax: Any, sharding: Any, kind: str) -> None:
    """Automatic axes cannot be serialised with a rule: such a call is whole. Explicit ones divide it."""
    pytest.importorskip("flatbuffers")
    from jax import export

    call, mesh = four(), mesh_of(jax, kind, b=2, h=2)
    given = put(jax, mesh, call.arrays, BATCH)
    run = jax.jit(lambda x: flat(of_jax.mla_decode)(**x, exportable=True))
    stored = export.export(run, disabled_checks=of_jax.disabled_checks())(given).serialize()
    close(jax.jit(export.deserialize(stored).call)(given), call.eager())
    assert moves(jax, run, given) == ({"all-gather"} if kind == "Auto" else set())


# ---- The rule ------------------------------------------------------------------------------------------------------


def test_rules(sharding: Any) -> None:
    """Two query heads share a KV head; RoPE's key is for all."""
    parts = sharding.parts_of(
        {"h_q": ("h_kv?", "h_rope?")},
        [(["s_q", "h_q"], (3, 8)), (["s_kv", "h_kv"], (5, 4)), (["s_kv", "h_rope"], (5, 1))],
        [(["h_q", "s_q"], (8, 3)), (["s_kv", "h_rope"], (5, 1))],
    )
    text, keywords = parts.rule({"x": 4, "y": 2})
    assert text == "whole0 (h_q whole1), whole2 h_q, whole3 whole4 -> (h_q whole5) whole6, whole7 whole8"
    assert keywords == {"need_replication_factors": tuple(f"whole{i}" for i in range(9)), "whole1": 2, "whole5": 2}
    text, keywords = parts.rule({"x": 8})
    assert text == "whole0 h_q, whole1 apart0, whole2 whole3 -> h_q whole4, whole5 whole6"
    assert keywords == {"need_replication_factors": tuple(f"whole{i}" for i in range(7))}
    mesh = {"x": 2, "y": 2, "z": 3}
    assert parts.taken([(None, "x")], mesh) == {"h_q": ("x",)}
    assert parts.taken([(), ("y", "x")], mesh) == {"h_q": ("x",)}
    assert parts.taken([(None, ("x", "y"))], mesh) == {"h_q": ("x", "y")}
    assert parts.taken([(None, ("x", "z"))], mesh) == {}
    assert parts.taken([("x", None), ("y", None)], mesh) == {}
    taken = {"h_q": ("x",)}
    given, made = parts.specs(taken)
    assert (tuple(given[0]), tuple(given[2]), tuple(made[0])) == ((None, "x"), (None, None), ("x", None))


def test_axes_of_a_mesh_are_taken_once(sharding: Any) -> None:
    """The first of two axes gets a contested axis of the mesh; sizes out of proportion forbid it."""
    parts = sharding.parts_of(
        {"b": (), "s_q": ("ends",)},
        [(["b", "s_q"], (4, 6)), (["ends"], (3,))],
        [(["b", "s_q"], (4, 6))],
    )
    assert parts.taken([(None, None), ("x",)], {"x": 2}) == {}
    assert parts.taken([(None, None), ("x",)], {"x": 3}) == {"s_q": ("x",)}
    assert parts.taken([("x", "x")], {"x": 2}) == {"b": ("x",)}
