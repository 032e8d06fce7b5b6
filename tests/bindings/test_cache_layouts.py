"""Paged caches with an axis for the one KV head: FlashMLA's and FlashInfer's layouts mean what pages alone mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ShapeError, reference
from mla_cupy.cache_formats import without_heads
from mla_cupy.compat.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache
from mla_cupy.simulation import simulated
from tests.bindings.cases import CALLS, CALLS_OF_JAX, Array, BoundCall, as_tuple, decode, decode_in_fp8, sparse_decode
from tests.interop.test_torch import array, tensor
from tests.support.calls import assert_same
from tests.support.flat import cascade_decode, flat, mla_decode, plan_decode
from tests.support.recorder import Recorder


def caches(call: BoundCall) -> list[str]:
    """The paged caches of a call."""
    return [x.name for x in call.record.inputs if "page_size 1?" in x.axes and x.name in call.arrays]


PAGED = [call for call in CALLS if caches(call)]
PAGED_OF_JAX = [call for call in CALLS_OF_JAX if caches(call)]
paged = pytest.mark.parametrize("call", PAGED, ids=[call.id for call in PAGED])


def with_gaps(pages: Array) -> Array:
    """Equal pages, further apart in memory than necessary."""
    num_pages, page_size, width = pages.shape
    nbytes = -(-page_size * width * pages.itemsize // 16) * 16 + 16
    memory = np.full(num_pages * nbytes + 64, 0xFF, np.uint8)
    strides = (nbytes, width * pages.itemsize, pages.itemsize)
    spread: Array = np.ndarray(pages.shape, pages.dtype, memory, -memory.ctypes.data % 64, strides)
    spread[...] = pages
    return spread


LAYOUTS = {
    "flashmla": lambda pages: pages[:, :, None],
    "flashinfer": lambda pages: pages[:, None],
    "flashinfer-gaps": lambda pages: with_gaps(pages)[:, None],
    "flashinfer-swapped": lambda pages: with_gaps(pages)[:, :, None].swapaxes(1, 2),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def laid_out(call: BoundCall, layout: str) -> BoundCall:
    """The call with its caches so."""
    made = {name: LAYOUTS[layout](without_heads(call.arrays[name]).copy()) for name in caches(call)}
    return BoundCall(call.id, call.operation, {**call.arrays, **made}, call.options)


def alone(call: BoundCall) -> BoundCall:
    """The call with pages alone."""
    made = {name: without_heads(call.arrays[name]) for name in caches(call)}
    return BoundCall(call.id, call.operation, {**call.arrays, **made}, call.options)


def compare(call: BoundCall, got: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Results, and what is changed, whose shape stays that of the caller's cache."""
    names = (*call.outputs, *call.changed)
    assert len(got) == len(wanted) == len(names)
    for name, x, expected in zip(names, got, wanted, strict=True):
        if expected is not None and name in caches(call):
            assert x.shape == call.arrays[name].shape
            x = without_heads(x)
        if expected is not None:
            assert_same(np.ascontiguousarray(x), np.ascontiguousarray(expected))


@pytest.mark.usefixtures("_numpy_backend")
@paged
@layouts
def test_numpy(call: BoundCall, layout: str) -> None:
    changed = laid_out(call, layout)
    got = as_tuple(flat(getattr(mla_cupy, call.operation))(**changed.arrays, **call.options))
    compare(changed, (*got, *(changed.arrays.get(name) for name in changed.changed)), alone(call).eager())


@pytest.mark.usefixtures("_numpy_backend")
@paged
@layouts
def test_torch(torch: Any, of_torch: Any, call: BoundCall, layout: str) -> None:
    changed = laid_out(call, layout)
    given = {name: tensor(torch, x) for name, x in changed.arrays.items()}
    options = {name: getattr(torch, x) if name.endswith("dtype") else x for name, x in call.options.items()}
    got = as_tuple(flat(getattr(of_torch, call.operation))(**given, **options))
    found = [None if x is None else array(torch, x) for x in (*got, *(given.get(name) for name in changed.changed))]
    compare(changed, tuple(found), alone(call).eager())


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("call", PAGED_OF_JAX, ids=[call.id for call in PAGED_OF_JAX])
@pytest.mark.parametrize("layout", ["flashmla", "flashinfer"])
def test_jax(jax: Any, of_jax: Any, call: BoundCall, layout: str) -> None:
    changed = laid_out(call, layout)
    function = jax.jit(lambda arrays: flat(getattr(of_jax, call.operation))(**arrays, **call.options))
    given = {name: np.ascontiguousarray(x) for name, x in changed.arrays.items()}
    got = as_tuple(function({name: jax.device_put(x, jax.devices("cpu")[0]) for name, x in given.items()}))
    compare(changed, tuple(None if x is None else np.asarray(x) for x in got), alone(call).eager())


def said(recorder: Recorder, arrays: dict[str, Array]) -> list[Any]:
    """The arguments of each launch about the caller's arrays, and everything else except addresses."""
    names = {x.__array_interface__["data"][0]: name for name, x in arrays.items()}
    told = []
    for launch in recorder.launches:
        members = launch.params.dtype.names or ()
        values = {
            name: names.get(int(launch.params[name]), "") if launch.params.dtype[name] == np.uint64
            else launch.params[name].tolist()
            for name in members
        }  # fmt: skip
        told.append((launch.entry, launch.grid, values))
    return told


@paged
@layouts
def test_launches(call: BoundCall, layout: str, recorder: Recorder) -> None:
    """Kernels are told the same of each layout of one memory."""
    changed = laid_out(call, layout)
    pages = {name: without_heads(changed.arrays[name]) for name in caches(call)}
    found = []
    for arrays in (changed.arrays, {**changed.arrays, **pages}):
        recorder.launches.clear()
        flat(getattr(mla_cupy, call.operation))(**arrays, **call.options)
        found.append(said(recorder, arrays))
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("call", [decode(), decode_in_fp8(""), sparse_decode("v4", extra=True)], ids=lambda x: x.id)
def test_simulated(call: BoundCall) -> None:
    changed = laid_out(call, "flashinfer-gaps")
    wanted = getattr(reference, call.operation)(**alone(call).arrays, **call.options)
    with simulated():
        out, lse = flat(getattr(mla_cupy, call.operation))(**changed.arrays, **call.options)
    np.testing.assert_allclose(out.astype(np.float64), wanted[0], atol=0.1)
    np.testing.assert_allclose(lse, wanted[1], atol=0.05)


@pytest.mark.usefixtures("_numpy_backend")
@layouts
def test_plans_and_cascades(layout: str) -> None:
    call = decode()
    changed, wanted = laid_out(call, layout).arrays, alone(call).eager()
    b, s_q, h_q, _ = changed["q"].shape
    sizes = {"max_pages": changed["block_table"].shape[1], "page_size": 64, "dtype": "bfloat16"}
    plan = plan_decode(max_b=b, s_q=s_q, h_q=h_q, **sizes)
    plan.update(changed["seqlens"])
    for got, expected in zip(mla_decode(**changed, plan=plan, check=False), wanted, strict=True):
        assert_same(got, expected)
    table, lengths = np.array([[1, 2], [1, 3]], np.int32), np.array([70, 100], np.int32)
    shared = {**changed, "q": changed["q"][:2], "block_table": table, "seqlens": lengths}
    expected = mla_decode(**{**shared, "kv_cache": without_heads(shared["kv_cache"])})
    groups = mla_cupy.shared_prefixes(table, lengths, page_size=64, h_q=h_q, always=True)
    for check in (False, True):
        for got, wanted_of in zip(cascade_decode(**shared, groups=groups, check=check), expected, strict=True):
            assert_same(got, wanted_of)
    assert_same(mla_decode(**shared, check=True)[0], expected[0])


@pytest.mark.usefixtures("_numpy_backend")
@layouts
def test_compat(layout: str) -> None:
    """FlashMLA's interface: dense, and the flat list of tokens that indices select."""
    call = decode()
    pages = without_heads(call.arrays["kv_cache"])
    q, table, lengths = (call.arrays[name] for name in ("q", "block_table", "seqlens"))
    indices = np.random.default_rng(3).integers(-1, 64, (len(q), q.shape[1], 7)).astype(np.int32)
    cache = LAYOUTS[layout](pages.copy())
    dense = [
        flash_mla_with_kvcache(q, x, table, lengths, 512, FlashMLASchedMeta(), causal=True)
        for x in (cache, pages[:, :, None])
    ]
    assert_same(dense[0][0], dense[1][0])
    if "gaps" in layout or "swapped" in layout:
        with pytest.raises(ShapeError, match=r"k_cache's stride of pages: .*copy the cache to pages without gaps"):
            flash_mla_with_kvcache(q, cache, None, None, 512, FlashMLASchedMeta(), indices=indices)
        return
    sparse = [
        flash_mla_with_kvcache(q, x, None, None, 512, FlashMLASchedMeta(), indices=indices)
        for x in (cache, pages[:, :, None])
    ]
    assert_same(sparse[0][0], sparse[1][0])


@pytest.mark.usefixtures("_numpy_backend")
@paged
def test_more_heads_are_refused(call: BoundCall) -> None:
    """Both layouts that are understood are named."""
    for name in caches(call):
        cache = np.repeat(without_heads(call.arrays[name])[:, :, None], 2, axis=2)
        with pytest.raises(ShapeError, match=rf"^{name}.shape: got .* \(num_pages, page_size, 1, width\) or") as caught:
            flat(getattr(mla_cupy, call.operation))(**{**call.arrays, name: cache}, **call.options)
        assert "(num_pages, 1, page_size, width)" in str(caught.value)


@pytest.mark.usefixtures("_numpy_backend")
def test_pages_of_one_token() -> None:
    """Both axes have size 1 then, and both readings are right."""
    rng = np.random.default_rng(0)
    q, pages = rng.standard_normal((1, 1, 4, 576)).astype(np.float16), rng.standard_normal((5, 1, 576))
    table, lengths = np.array([[4, 0, 2]], np.int32), np.array([3], np.int32)
    pages = pages.astype(np.float16)
    wanted = mla_decode(q, pages, table, lengths)
    for cache in (pages[:, None], pages[:, :, None]):
        assert cache.shape == (5, 1, 1, 576)
        assert_same(mla_decode(q, cache, table, lengths)[0], wanted[0])
