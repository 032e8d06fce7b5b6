"""`PagedKVCache` with arrays of PyTorch and JAX: the ledger's walks, and what each library's arrays are.

The same walks on a GPU, streams and graphs: test_libraries_gpu.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, PagedKVCache
from tests.cache.ledger import conversions
from tests.cache.walk import walk

SIZES: dict[str, Any] = {"num_pages": 10, "page_size": 4, "max_seqs": 4, "max_pages": 5}
LIBRARIES = ("torch", "jax")


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    name: str = request.param
    return name


def cache(library: str, record: Any = "bf16", **changes: Any) -> PagedKVCache:
    return PagedKVCache(record, **{**SIZES, "device": "cpu", **changes}, library=library)


@pytest.mark.parametrize("seed", range(2))
def test_the_cache_does_what_it_says(library: str, seed: int) -> None:
    walk(seed, 60, 10, library=library)


@pytest.mark.parametrize("record", ["bf16", "fp16", "v32", "indexer"])
def test_all_arrays_are_the_library_s(library: str, record: str) -> None:
    made = cache(library, {"kv": record}, num_layers=2)
    a, _ = made.allocate()
    step = made.extend([a], 6)
    arrays = (*vars(step).values(), made.block_table, made.seqlens, made.layer(1), made.pages(a))
    kinds = {type(x).__module__.partition(".")[0] for x in arrays if not isinstance(x, int)}
    assert kinds <= {"torch"} if library == "torch" else kinds <= {"jaxlib", "jax"}
    assert str(made.layer(0).dtype).removeprefix("torch.") == made.formats["kv"].dtype
    assert made.layer(0).shape == (10, 4, made.formats["kv"].width)


def test_a_step_decodes_as_with_numpy(library: str) -> None:
    """A shared prefix, a copied page, and tokens written by `append`."""
    rng = np.random.default_rng(0)
    latent, rope, more, q = (
        rng.standard_normal(shape).astype(np.float16) for shape in ((6, 512), (6, 64), (2, 512), (2, 1, 4, 576))
    )
    found = []
    for name in ("numpy", library):
        made = cache(name, "fp16")
        of, host = conversions(made.seqlens)
        a, _ = made.allocate()
        made.append(made.extend([a], 6), 0, of(latent), of(rope))
        (b,) = made.fork(a)
        step = made.extend([a, b], 1)
        assert step.copies == 1
        made.append(step, 0, of(more), of(rope[:2]))
        functions = importlib.import_module("mla_cupy.jax") if name == "jax" else mla_cupy
        out, lse = functions.mla_decode(of(q), made.layer(0), step.block_table, step.seqlens, scale=0.05)
        found.append((host(out), host(lse)))
    for mine, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_steps_keep_their_addresses_in_torch() -> None:
    pytest.importorskip("torch")
    made = cache("torch")
    a, b = made.allocate()[0], made.allocate()[0]
    first, second = made.extend([a, b], 1), made.extend([a, b], 1)
    assert [x.data_ptr() for x in (first.slots, first.block_table, first.seqlens, made.layer(0))] == [
        x.data_ptr() for x in (second.slots, second.block_table, second.seqlens, made.layer(0))
    ]


def test_a_saved_tensor_that_a_step_overwrites_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    made = cache("torch", "fp16")
    a, _ = made.allocate()
    step = made.extend([a], 1)
    x = torch.ones(1, requires_grad=True)
    product = x * step.seqlens.float().sum() * 0 + (x * made.layer(0)[0, 0, :1]).sum()
    made.append(step, 0, torch.ones(1, 512, dtype=torch.float16), torch.ones(1, 64, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_jax_pages_go_through_jit() -> None:
    """A function under `jit` takes the pages, donated, and returns them."""
    jax = pytest.importorskip("jax")
    functions = importlib.import_module("mla_cupy.jax")
    made, eager = cache("jax", "fp16"), cache("jax", "fp16")
    latent, rope = (np.full((3, width), 2, np.float16) for width in (512, 64))
    write = jax.jit(lambda pages, slots: functions.cache_append(latent, rope, pages, slots), donate_argnums=0)
    for one in (made, eager):
        step = one.extend([one.allocate()[0]], 3)
        if one is made:
            one.set_layer(0, write(one.layer(0), step.slots))
        else:
            one.append(step, 0, jax.numpy.asarray(latent), jax.numpy.asarray(rope))
    np.testing.assert_array_equal(made.layer(0), eager.layer(0))
    with pytest.raises(mla_cupy.ShapeError, match=r"pages\.shape: got"):
        made.set_layer(0, made.layer(0)[1:])
    with pytest.raises(mla_cupy.DTypeError, match=r"pages\.dtype: got"):
        made.set_layer(0, made.layer(0).astype("bfloat16"))


def test_earlier_steps_of_jax_stay_as_they_were() -> None:
    pytest.importorskip("jax")
    made = cache("jax")
    a, _ = made.allocate()
    first = made.extend([a], 2)
    made.extend([a], 1)
    assert first.seqlens.tolist() == [2]
    assert first.slots.tolist() == [0, 1]


def test_pages_of_jax_have_no_room_between_them() -> None:
    pytest.importorskip("jax")
    with pytest.raises(ArgumentError, match="page_size: got 2, pages of 264 bytes, expected a multiple of 16"):
        cache("jax", {"kv": "indexer"}, page_size=2)
