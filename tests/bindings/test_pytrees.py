"""Groups of arguments as pytrees: arrays are leaves, numbers and names are static."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from mla_cupy import Fp8, LossResults, OutRope, Packed, Project, Shard
from mla_cupy.ops.groups import GROUPS, joined, leaves
from tests.support.flat import default_scale

ARRAY = np.ones(3, np.float32)
#: Groups, and the members of them that are arrays.
SHOWN = [
    (Fp8("fp8", 2.0, np.float32(0.5)), ()),
    (Fp8("fp8", ARRAY, ARRAY), ("q_scale", "kv_scale")),
    (LossResults(kl=ARRAY, out=ARRAY), ("kl", "out")),
    (OutRope(ARRAY, ARRAY, ARRAY), ("cos", "sin", "positions")),
    (Packed(ARRAY, max_seqlen_q=3), ("cu_seqlens_q",)),
    (Project(ARRAY), ("w_uv",)),
    (Shard(4, 1), ()),
]
shown = pytest.mark.parametrize(("group", "arrays"), SHOWN, ids=lambda x: type(x).__name__)


def test_every_group_is_shown() -> None:
    assert {type(group) for group, _ in SHOWN} == {*GROUPS}


@shown
def test_split_and_joined(group: Any, arrays: tuple[str, ...]) -> None:
    found, structure = leaves(group)
    assert [x is getattr(group, name) for x, name in zip(found, arrays, strict=True)] == [True] * len(arrays)
    assert hash(structure) == hash(copy.deepcopy(structure))
    assert vars(joined(type(group), structure, found)) == vars(group)


@shown
def test_torch(group: Any, arrays: tuple[str, ...]) -> None:
    pytest.importorskip("mla_cupy.torch")
    import torch.utils._pytree as pytree

    found, spec = pytree.tree_flatten({"a": group})
    assert len(found) == len(arrays)
    again = pytree.tree_unflatten(range(len(found)), spec)["a"]
    assert [getattr(again, name) for name in arrays] == [*range(len(arrays))]


@shown
def test_jax(group: Any, arrays: tuple[str, ...]) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("mla_cupy.jax")
    found, tree = jax.tree.flatten((group,))
    assert len(found) == len(arrays)
    (again,) = jax.tree.unflatten(tree, range(len(found)))
    assert [getattr(again, name) for name in arrays] == [*range(len(arrays))]
    (traced,) = jax.jit(lambda *x: x)(group)
    assert type(traced) is type(group)


def decode_inputs() -> tuple[Any, ...]:
    q, cache = np.ones((2, 1, 4, 512), np.float16), np.ones((2, 16, 512), np.float16)
    return q, cache, np.array([[0], [1]], np.int32), np.array([9, 5], np.int32)


def test_a_group_is_an_argument_of_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group passes through `jit` and `vmap` of a caller's function, not only through ours."""
    jax = pytest.importorskip("jax")
    import mla_cupy.jax as mla

    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs, angles = decode_inputs(), np.linspace(0, 1, 10 * 32, dtype=np.float32).reshape(10, 32)
    turned = OutRope(np.cos(angles), np.sin(angles), np.array([[8], [4]], np.int32))
    scale = default_scale(inputs[0])
    plain = mla.mla_decode(
        *map(jax.numpy.asarray, inputs), scale=scale, out_rope=jax.tree.map(jax.numpy.asarray, turned)
    )
    jitted = jax.jit(lambda x, group: mla.mla_decode(*x, scale=scale, out_rope=group))(inputs, turned)
    np.testing.assert_array_equal(plain[0], jitted[0])


def test_a_group_is_an_argument_of_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import mla_cupy.torch as mla

    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = tuple(map(torch.from_numpy, decode_inputs()))
    angles = torch.linspace(0, 1, 320).reshape(10, 32)
    turned = OutRope(angles.cos(), angles.sin(), torch.tensor([[8], [4]], dtype=torch.int32))

    def step(group: OutRope) -> Any:
        return mla.mla_decode(*inputs, scale=0.1, out_rope=group)[0]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(turned), step(turned), rtol=0, atol=0)
