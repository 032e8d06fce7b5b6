"""JAX arrays: through DLPack, results are JAX arrays, nothing is written in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, DTypeError, reference
from tests.support.calls import assert_same, oracle, plan_of
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.gpu import uploaded
from tests.support.tolerance import check

CASE = DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", strides="dense")


def put(jax: Any, arguments: tuple[Any, ...], platform: str) -> list[Any]:
    return [jax.device_put(np.ascontiguousarray(x), jax.devices(platform)[0]) for x in arguments]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cpu_arrays(jax: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(DecodeCase(h_q=4, seqlens=70, dtype=dtype))
    out, lse = mla_decode(*put(jax, inputs.arguments, "cpu"))
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert {device.platform for device in out.devices() | lse.devices()} == {"cpu"}
    expected = oracle(inputs)
    assert_same(np.asarray(out), expected[0])
    assert_same(np.asarray(lse), expected[1])


def test_cpu_results_cannot_be_given(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    inputs = make(DecodeCase(h_q=4, seqlens=70))
    arguments = put(jax, inputs.arguments, "cpu")
    out, lse = mla_decode(*arguments)
    for options in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        refused = f"{next(iter(options))}: got an array of jax, expected None; its arrays are immutable"
        with pytest.raises(DTypeError, match=refused):
            mla_decode(*arguments, **options)
    assert_same(np.asarray(out), oracle(inputs)[0])


def test_the_binding_is_named_for_what_is_changed(jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")
    zeros, slots = jax.numpy.zeros, jax.numpy.array([1])
    latent, pages = zeros((1, 512), jax.numpy.bfloat16), zeros((2, 4, 656), jax.numpy.uint8)
    calls = {
        "cache_append": ("cache", (latent, latent[:, :64], pages, slots)),
        "cache_copy_pages": ("pool", (pages[None], zeros((1, 2), jax.numpy.int32))),
        "indexer_cache_append": ("cache", (latent[:, :32], pages[..., :36], slots)),
    }
    for function, (name, arguments) in calls.items():
        said = f"{name}: got an array of jax, expected a writable array; .* call mla_cupy.jax.{function}, which"
        with pytest.raises(DTypeError, match=said):
            getattr(mla_cupy, function)(*arguments)


def test_a_scale_is_a_python_number(jax: Any) -> None:
    arguments = put(jax, make(DecodeCase(h_q=4, seqlens=70)).arguments, "cpu")
    with pytest.raises(ArgumentError, match=r"^scale: got Array\(.*, expected a finite .*; pass a Python number$"):
        mla_cupy.mla_decode(*arguments, scale=jax.numpy.float32(0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_arrays(jax_gpu: Any, dtype: str) -> None:
    inputs = make(DecodeCase(b=4, s_q=2, h_q=32, seqlens="ragged-700", dtype=dtype, strides="dense"))
    out, lse = mla_decode(*put(jax_gpu, inputs.arguments, "gpu"))
    assert isinstance(out, jax_gpu.Array)
    assert isinstance(lse, jax_gpu.Array)
    assert {device.platform for device in out.devices() | lse.devices()} == {"gpu"}
    got = np.asarray(out), np.asarray(lse)
    check(got, inputs.exact, inputs.rounded, dtype)
    of_cupy = mla_decode(*uploaded(inputs))
    assert_same(got[0], of_cupy[0].get())
    assert_same(got[1], of_cupy[1].get())


@pytest.mark.gpu
def test_gpu_results_cannot_be_given(jax_gpu: Any) -> None:
    inputs = make(CASE)
    arguments = put(jax_gpu, inputs.arguments, "gpu")
    out, lse = mla_decode(*arguments)
    for options in ({"out": out}, {"lse": lse}):
        with pytest.raises(DTypeError, match="are immutable"):
            mla_decode(*arguments, **options)


@pytest.mark.gpu
def test_gpu_work_before_and_after_is_ordered(jax_gpu: Any) -> None:
    """The inputs are still being computed when the call is made, the results when they are used."""
    jnp, inputs = jax_gpu.numpy, make(CASE)
    q, kv_cache, table, seqlens = put(jax_gpu, inputs.arguments, "gpu")
    expected = np.asarray(mla_decode(q, kv_cache, table, seqlens)[0]).astype(np.float32)
    slow = jax_gpu.jit(lambda x, work: x + (0 * (work @ work @ work).sum()).astype(x.dtype))
    work = jnp.ones((4096, 4096), jnp.float32)
    slow(q, work).block_until_ready()
    for _ in range(5):
        out, _ = mla_decode(slow(q, work), kv_cache, table, seqlens)
        doubled = out.astype(jnp.float32) * 2
        np.testing.assert_array_equal(np.asarray(doubled), 2 * expected)


@pytest.mark.gpu
def test_gpu_memory_of_dropped_arrays_is_not_reused_too_early(jax_gpu: Any) -> None:
    """The inputs are dropped right after the call, long before it runs; JAX may reuse their memory at once."""
    import cupy

    busy = cupy.ones((4096, 4096), cupy.float32)
    jnp, inputs = jax_gpu.numpy, make(DecodeCase(b=8, h_q=128, seqlens=3000, strides="dense"))
    q, kv_cache, table, seqlens = put(jax_gpu, inputs.arguments, "gpu")
    expected = np.asarray(mla_decode(q, kv_cache, table, seqlens)[0])
    copy, spoil = jax_gpu.jit(lambda x: x + 0), jax_gpu.jit(lambda x: jnp.full_like(x, 100))
    results = []
    for _ in range(30):
        busy @ busy  # on the stream that the call goes to
        results.append(mla_decode(copy(q), copy(kv_cache), copy(table), copy(seqlens))[0])
        spoil(q)
        spoil(kv_cache)
    for out in results:
        assert_same(np.asarray(out), expected)


@pytest.mark.gpu
def test_gpu_plan(jax_gpu: Any) -> None:
    inputs = make(CASE)
    arguments = put(jax_gpu, inputs.arguments, "gpu")
    plan = plan_of(inputs)
    plan.update(arguments[3])
    for _ in range(3):
        out, lse = mla_decode(*arguments, plan=plan)
        assert isinstance(out, jax_gpu.Array)
        check((np.asarray(out), np.asarray(lse)), inputs.exact, inputs.rounded, CASE.dtype)


@pytest.mark.gpu
def test_gpu_merge(jax_gpu: Any) -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 1, 4, 64), np.float32), rng.standard_normal((3, 2, 4, 1), np.float32)
    out, lse = mla_cupy.merge_states(*put(jax_gpu, (outs, lses), "gpu"))
    assert isinstance(out, jax_gpu.Array)
    exact = reference.merge_states(outs, lses)
    np.testing.assert_allclose(np.asarray(out), exact[0], rtol=0, atol=4e-6)
    np.testing.assert_allclose(np.asarray(lse), exact[1], rtol=1e-6, atol=1e-6)
