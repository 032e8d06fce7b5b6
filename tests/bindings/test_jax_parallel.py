"""Context-parallel prefill inside `jax.shard_map`: four devices of the host agree with one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, ShapeError
from mla_cupy.ops.groups import Packed
from mla_cupy.parallel import Zigzag

pytestmark = pytest.mark.usefixtures("_numpy_backend")

WORLD, AXIS = 4, "cp"
HEADS, LATENT, NOPE, ROPE, VALUES = 2, 64, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
TOPK = 8
_SHARED = ("w",)
Arrays = dict[str, Any]


@pytest.fixture
def mesh(jax: Any) -> Any:
    devices = jax.devices("cpu")
    if len(devices) < WORLD or not hasattr(jax, "shard_map"):
        pytest.skip(f"JAX has fewer than {WORLD} CPU devices, or no shard_map")
    return jax.sharding.Mesh(np.array(devices[:WORLD]), (AXIS,))


def expand(latents: Any, w: Any) -> tuple[Any, Any]:
    """Keys and values per head."""
    kv = (latents @ w.T).reshape(len(latents), HEADS, NOPE + VALUES)
    return kv[..., :NOPE], kv[..., NOPE:]


def _random(jax: Any, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    rng, jnp = np.random.default_rng(0), jax.numpy
    made = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return {name: x if name == "weights" else x.astype(jnp.bfloat16) for name, x in made.items()}


def _over_devices(jax: Any, mesh: Any, zigzag: Zigzag, function: Any, given: Arrays) -> Any:
    """Value and gradients of the sum of a function over the devices, and its other results, in the sequences' order."""
    spec = jax.sharding.PartitionSpec
    rows = np.concatenate([zigzag.rows(rank) for rank in range(zigzag.world)])
    dealt = {name: x if name in _SHARED else x[rows] for name, x in given.items()}
    specs = {name: spec() if name in _SHARED else spec(AXIS) for name in given}

    def local(given: Arrays) -> Any:
        value, others = function(given)
        return jax.lax.psum(value, AXIS), others

    over = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(spec(), spec(AXIS)))
    lowered = jax.jit(jax.value_and_grad(over, has_aux=True)).lower(dealt)
    assert "tensor<0xi32>" not in lowered.as_text(), "a scatter without indices, which crashes JAX 0.11"
    (value, others), gradients = lowered.compile()(dealt)
    joined = {name: x if name in _SHARED else zigzag.join(x) for name, x in gradients.items()}
    return value, {name: zigzag.join(x) for name, x in others.items()}, joined


def _close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        for x, y in zip(*(map(np.float64, _leaves(tree)) for tree in (one, other)), strict=True):
            assert np.linalg.norm(y) > 0
            assert np.linalg.norm(x - y) < 8e-3 * np.linalg.norm(y)


def _leaves(tree: Any) -> list[Any]:
    return [np.asarray(tree[name]).astype(np.float64) for name in sorted(tree)] if isinstance(tree, dict) else [tree]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("lengths", "chunk_tokens"), [((32,), 8), ((24, 8), 1 << 14)])
def test_prefill(jax: Any, of_jax: Any, mesh: Any, lengths: tuple[int, ...], chunk_tokens: int) -> None:
    """Results and gradients, of one sequence in several chunks, and of several sequences."""
    _check_prefill(jax, of_jax, mesh, Zigzag(lengths, WORLD), chunk_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_prefill_on_gpus(jax_gpu: Any, of_jax: Any, world: int) -> None:
    """One device still meets its early piece's keys in calls of their own."""
    _check_prefill(jax_gpu, of_jax, _of_gpus(jax_gpu, world), Zigzag((200, 56), world), 64)


def _of_gpus(jax: Any, world: int) -> Any:
    devices = jax.devices("gpu")[:world]
    if len(devices) < world:
        pytest.skip(f"needs {world} GPUs")
    return jax.sharding.Mesh(np.array(devices), (AXIS,))


def _check_prefill(jax: Any, of_jax: Any, mesh: Any, zigzag: Zigzag, chunk_tokens: int) -> None:
    from mla_cupy.jax.parallel import prefill

    lengths, n = zigzag.lengths, zigzag.tokens
    shapes = {"q": (n, HEADS, NOPE), "q_rope": (n, HEADS, ROPE), "latents": (n, LATENT), "k_rope": (n, ROPE)}
    given = _random(jax, {**shapes, "w": (HEADS * (NOPE + VALUES), LATENT), "dout": (n, HEADS, VALUES)})
    given["w"] = given["w"] * LATENT**-0.5
    starts = np.cumsum([0, *lengths]).astype(np.int32)

    def objective(out: Any, lse: Any, x: Arrays) -> Any:
        found = (out.astype("float32") * jax.lax.stop_gradient(x["dout"])).sum() + lse.sum()
        return found, {"out": out, "lse": lse}

    def whole(x: Arrays) -> Any:
        of = {"q_rope": x["q_rope"], "k_rope": x["k_rope"], "packed": Packed(starts, starts), "scale": SCALE}
        return objective(*of_jax.mla_prefill(x["q"], *expand(x["latents"], x["w"]), **of), x)

    def local(x: Arrays) -> Any:
        of = {"q_rope": x["q_rope"], "k_rope": x["k_rope"], "parameters": (x["w"],), "scale": SCALE}
        return objective(*prefill(x["q"], x["latents"], expand, zigzag, AXIS, chunk_tokens=chunk_tokens, **of), x)

    found = _over_devices(jax, mesh, zigzag, local, given)
    (value, others), gradients = jax.jit(jax.value_and_grad(whole, has_aux=True))(given)
    for x in (found[2], gradients):
        x.pop("dout")
    _close(found, (value, others, gradients))


def test_sparse(jax: Any, of_jax: Any, mesh: Any) -> None:
    """Selection, attention, both losses, and the gradients of all of them."""
    _check_sparse(jax, of_jax, mesh, Zigzag((24, 8), WORLD))


@pytest.mark.gpu
def test_sparse_on_gpus(jax_gpu: Any, of_jax: Any) -> None:
    _check_sparse(jax_gpu, of_jax, _of_gpus(jax_gpu, 2), Zigzag((24, 8), 2))


def _check_sparse(jax: Any, of_jax: Any, mesh: Any, zigzag: Zigzag) -> None:
    from mla_cupy.jax.parallel import sparse_prefill, warmup_objective

    n = zigzag.tokens
    shapes = {"q": (n, HEADS, 576), "latents": (n, 576), "index_q": (n, 4, 32), "index_k": (n, 32), "weights": (n, 4)}
    given = _random(jax, shapes)
    order = ("q", "latents", "index_q", "index_k", "weights")
    scale = 192**-0.5

    def function(x: Arrays, run: Any, warm: Any) -> Any:
        found = run(*(x[name] for name in order))
        main = jax.lax.stop_gradient((x["q"], found.latents))
        index = x["index_q"], found.index_k, x["weights"]
        of = {"scale": scale, "lse": jax.lax.stop_gradient(found.lse), "causal": False}
        sparse, kl = of_jax.indexer_sparse_objective(*main, *index, found.indices, **of)
        value, warm_kl = warm(*main, *index)
        value += sparse + (found.out.astype("float32") ** 2).sum()
        return value, {"out": found.out, "lse": found.lse, "kl": kl, "warm": warm_kl, "indices": found.indices}

    def of_zigzag(zigzag: Zigzag, warm: Any) -> Any:
        return lambda x: function(x, lambda *y: sparse_prefill(*y, zigzag, AXIS, scale=scale, topk=TOPK), warm)

    starts = np.array([0, 24, 32], np.int32)
    warm = functools.partial(of_jax.indexer_warmup_objective, scale=scale, packed=Packed(starts, starts))
    alone, one = Zigzag(zigzag.lengths, 1), jax.sharding.Mesh(mesh.devices[:1], (AXIS,))
    value, others, gradients = _over_devices(jax, one, alone, of_zigzag(alone, warm), given)
    warm = functools.partial(warmup_objective, zigzag=zigzag, axis=AXIS, scale=scale)
    found = _over_devices(jax, mesh, zigzag, of_zigzag(zigzag, warm), given)
    np.testing.assert_array_equal(np.asarray(found[1].pop("indices")), np.asarray(others.pop("indices")))
    _close(found, (value, others, gradients))


def test_codes(jax: Any, mesh: Any) -> None:
    """Index keys in FP8 travel with their scales."""
    from mla_cupy.jax.parallel import sparse_prefill

    jnp, n, spec = jax.numpy, 32, jax.sharding.PartitionSpec(AXIS)
    x = _random(jax, {"q": (n, HEADS, 576), "latents": (n, 576), "index_q": (n, 4, 32), "index_k": (n, 32)})
    x |= {name: x[name].astype(jnp.float8_e4m3fn) for name in ("index_q", "index_k")}
    x |= {"weights": jnp.ones((n, 4)), "k_scale": 1 + jnp.arange(n) / n}

    def found(devices: int) -> tuple[Any, Any]:
        zigzag, some = Zigzag((24, 8), devices), jax.sharding.Mesh(mesh.devices[:devices], (AXIS,))

        def local(x: Arrays) -> Any:
            of = sparse_prefill(**x, zigzag=zigzag, axis=AXIS, scale=SCALE, topk=TOPK)
            return of.out, of.indices, of.k_scale

        rows = np.concatenate([zigzag.rows(rank) for rank in range(devices)])
        dealt = {name: y[rows] for name, y in x.items()}
        out, indices, scales = jax.jit(jax.shard_map(local, mesh=some, in_specs=spec, out_specs=spec))(dealt)
        np.testing.assert_array_equal(scales, np.tile(x["k_scale"], devices))
        return zigzag.join(out), zigzag.join(indices)

    for many, one in zip(found(WORLD), found(1), strict=True):
        np.testing.assert_allclose(np.float32(many), np.float32(one), rtol=2e-2, atol=1e-3)


def test_what_does_not_fit(jax: Any, mesh: Any) -> None:
    from mla_cupy.jax.parallel import gather

    spec, x = jax.sharding.PartitionSpec(AXIS), np.zeros((16, 2), np.float32)

    def gathered(zigzag: Zigzag) -> Any:
        return jax.shard_map(lambda x: gather(x, zigzag, AXIS), mesh=mesh, in_specs=spec, out_specs=spec)(x)

    with pytest.raises(ArgumentError, match=r"zigzag\.lengths: got \(12, 4\), expected multiples of 8"):
        gathered(Zigzag((12, 4), WORLD))
    with pytest.raises(ArgumentError, match=r"axis: got 'cp' of 4 devices, expected zigzag\.world=2"):
        gathered(Zigzag((16,), 2))
    with pytest.raises(ShapeError, match=r"x\.shape\[0\]: got 4, expected 2"):
        gathered(Zigzag((8,), WORLD))
