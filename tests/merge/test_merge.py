"""merge_states against the oracle: on the CPU bit by bit, on a GPU within float32 rounding."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from tests.support.calls import Array, assert_same, on_host
from tests.support.cases import DecodeCase, make
from tests.support.flat import mla_decode
from tests.support.gpu import upload, uploaded
from tests.support.sim_driver import simulated
from tests.support.tolerance import check

DTYPES = ("bfloat16", "float16", "float32")


def states(n: int, dtype: str, d: int = 512, seed: int = 0) -> tuple[Array, Array]:
    """n states of (2, 3, 5, d) with gaps of NaN; a third of them empty, whose outputs are NaN; one row empty in all."""
    rng = np.random.default_rng(seed)
    whole = np.full((n, 2, 3, 6, d + 3), np.nan, dtypes.numpy_dtype(dtype))
    outs = whole[:, :, :, :5, :d]
    outs[...] = rng.standard_normal(outs.shape, np.float32)
    lses = np.full((n, 2, 5, 6), np.nan, np.float32)[..., ::2]
    lses[...] = 4 * rng.standard_normal(lses.shape, np.float32)
    empty = rng.random(lses.shape) < 0.3
    empty[:, 0, 1, 2] = True
    lses[empty] = rng.choice(np.array([-np.inf, np.inf], np.float32), int(empty.sum()))
    outs[np.swapaxes(empty, -1, -2)] = np.nan
    return outs, lses


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("options", [{}, {"lse_base": "2"}, {"empty_lse": math.inf}], ids=str)
def test_numpy_equals_rounded_oracle(dtype: str, n: int, options: dict[str, Any]) -> None:
    outs, lses = states(n, dtype, d=20)
    out, lse = mla_cupy.merge_states(outs, lses, **options)
    exact_out, exact_lse = reference.merge_states(outs, lses, **options)
    assert_same(out, dtypes.round_to(exact_out, dtype).astype(dtypes.numpy_dtype(dtype)))
    assert_same(lse, exact_lse.astype(np.float32))
    assert (out[0, 2, 1] == 0).all()
    assert lse[0, 1, 2] == options.get("empty_lse", -math.inf)
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.usefixtures("_numpy_backend")
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "bfloat16"), ("float32", "float16"), ("float16", "float32")]
)
def test_out_dtype(dtype: str, out_dtype: str) -> None:
    outs, lses = states(3, dtype, d=4)
    exact, _ = reference.merge_states(outs, lses)
    expected = dtypes.round_to(exact, out_dtype).astype(dtypes.numpy_dtype(out_dtype))
    assert_same(mla_cupy.merge_states(outs, lses, out_dtype=out_dtype)[0], expected)
    given = np.zeros(expected.shape, expected.dtype)
    assert mla_cupy.merge_states(outs, lses, out=given)[0] is given
    assert_same(given, expected)


@pytest.mark.usefixtures("_numpy_backend")
def test_given_arrays_are_written_where_they_lie() -> None:
    outs, lses = states(3, "float32", d=4)
    whole_out, whole_lse = np.full((2, 6, 5, 9), 7, np.float32), np.full((4, 5, 3), 7, np.float32)
    out, lse = whole_out[:, ::2, :, :4], whole_lse[::2]
    results = mla_cupy.merge_states(outs, lses, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    exact = reference.merge_states(outs, lses)
    assert_same(out, exact[0].astype(np.float32))
    assert_same(lse, exact[1].astype(np.float32))
    assert (whole_out[:, 1::2] == 7).all()
    assert (whole_out[..., 4:] == 7).all()
    assert (whole_lse[1::2] == 7).all()


def test_what_a_simulated_gpu_held_is_freed() -> None:
    with simulated() as gpu:
        mla_cupy.merge_states(np.zeros((2, 1, 1, 2, 64), np.float32), np.zeros((2, 1, 2, 1), np.float32))
    assert gpu.launched
    kept = weakref.ref(gpu)
    del gpu
    gc.collect()
    assert kept() is None


@pytest.mark.usefixtures("_numpy_backend")
def test_shards_of_a_cache_merge_to_the_whole() -> None:
    arguments = make(DecodeCase(h_q=4, seqlens="ragged-100", page_size=16)).arguments
    whole = mla_decode(*arguments, out_dtype="float32")
    for got, wanted in zip(merged_shards(arguments, 16), whole, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def merged_shards(arguments: tuple[Any, ...], page_size: int, xp: Any = np) -> tuple[Any, Any]:
    """Every token lies in the first two pages of its sequence, or after them: decode both, and merge."""
    q, kv_cache, table, seqlens = arguments
    cut = 2 * page_size
    shards = [(table[:, :2], xp.minimum(seqlens, cut)), (table[:, 2:], xp.maximum(seqlens - cut, 0))]
    parts = [mla_decode(q, kv_cache, pages, n, out_dtype="float32") for pages, n in shards]
    return mla_cupy.merge_states(xp.stack([p[0] for p in parts]), xp.stack([p[1] for p in parts]))


# ---- On a GPU --------------------------------------------------------------------------------------------------


def assert_close(got: tuple[Array, Array], outs: Array, lses: Array, out_dtype: str, **options: Any) -> None:
    exact_out, exact_lse = reference.merge_states(outs, lses, **options)
    out, lse = got
    assert out.dtype == dtypes.numpy_dtype(out_dtype)
    ulp = float(np.spacing(np.ones(1, out.dtype))[0])
    np.testing.assert_allclose(out.astype(np.float64), exact_out, rtol=ulp, atol=4e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=2e-6)
    assert (out[0, 2, 1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("options", [{}, {"lse_base": "2", "empty_lse": math.inf}], ids=str)
def test_gpu_equals_oracle(gpu: object, dtype: str, n: int, options: dict[str, Any]) -> None:
    outs, lses = states(n, dtype, seed=n)
    got = on_host(mla_cupy.merge_states(upload(outs), upload(lses), **options))
    assert_close(got, outs, lses, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [1, 7, 64, 100, 512, 1000])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]
)
def test_gpu_widths_and_dtypes(gpu: object, d: int, dtype: str, out_dtype: str) -> None:
    outs, lses = states(4, dtype, d=d)
    got = on_host(mla_cupy.merge_states(upload(outs), upload(lses), out_dtype=out_dtype))
    assert_close(got, outs, lses, out_dtype)


@pytest.mark.gpu
def test_gpu_given_arrays_with_gaps(gpu: object) -> None:
    import cupy

    outs, lses = states(3, "bfloat16", d=100)
    whole_out, whole_lse = cupy.full((2, 6, 5, 109), 7, outs.dtype), cupy.full((4, 5, 3), 7, cupy.float32)
    out, lse = whole_out[:, ::2, :, 1:101], whole_lse[::2]
    results = mla_cupy.merge_states(upload(outs), upload(lses), out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_close(on_host(results), outs, lses, "bfloat16")
    host_out, host_lse = on_host((whole_out, whole_lse))
    assert (host_out[:, 1::2].astype(np.float32) == 7).all()
    assert (host_out[..., 101:].astype(np.float32) == 7).all()
    assert (host_out[..., 0].astype(np.float32) == 7).all()
    assert (host_lse[1::2] == 7).all()


@pytest.mark.gpu
def test_gpu_nan_reaches_only_its_row(gpu: object) -> None:
    outs, lses = states(3, "float32")
    lses[...] = np.where(np.isinf(lses), 0, lses)
    outs[...] = np.nan_to_num(outs)
    lses[1, 1, 4, 0] = np.nan
    outs[2, 0, 1, 3, 8] = np.nan
    out, lse = on_host(mla_cupy.merge_states(upload(outs), upload(lses)))
    assert np.isnan(lse[1, 4, 0])
    assert np.isnan(out[1, 0, 4]).all()
    assert np.isnan(out[0, 1, 3, 8])
    assert int(np.isnan(lse).sum()) == 1
    assert int(np.isnan(out).sum()) == 512 + 1


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [4, 128])
def test_gpu_shards_of_a_cache_merge_to_the_whole(gpu: object, h_q: int) -> None:
    import cupy

    inputs = make(DecodeCase(h_q=h_q, seqlens="ragged-300", b=5))
    check(on_host(merged_shards(uploaded(inputs), 64, cupy)), inputs.exact, inputs.rounded, inputs.case.dtype)
