"""Values of "v32" whose scales are small, large, or mixed: the mma.sync kernels multiply weights by them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mla_cupy
from mla_cupy import dtypes, reference
from mla_cupy.cache_formats import FORMATS
from tests.attention.test_mma_records import DENSE, SPARSE, Gpu
from tests.support.kernels import in_both_sizes
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import simulated

Array = npt.NDArray[Any]

#: Both sizes of shared memory, with conversions of e4m3 and without.
GPUS = (DENSE[0], DENSE[1], SPARSE[0], SPARSE[2])
PAGE = 64
#: Largest error in the root mean square; rounding products to float16 leaves 2e-4.
LIMIT = 5e-4
#: The only RoPE column other than 0: it adds to a token's logit.
LOGIT = 512


def cache_of(latent: Array, scales: Array, logits: Array) -> Array:
    """Pages of tokens with these latents; each 128 columns are divided by a scale."""
    n, form = len(latent), FORMATS["v32"]
    cache = np.zeros((-(-n // PAGE), PAGE, 1, form.token_bytes), np.uint8)
    rope = np.zeros((n, 64), np.float32)
    rope[:, 0] = logits
    codes = (
        (latent.reshape(n, 4, 128) / scales[..., None]).astype(np.float32).astype(dtypes.numpy_dtype("float8_e4m3fn"))
    )
    for name, values in (
        ("latent", codes),
        ("scales", scales.astype(np.float32)),
        ("rope", rope.astype(dtypes.numpy_dtype("bfloat16"))),
    ):
        field = form.field(name)
        view = reference.cache.field_view(cache[:, :, 0], form, field)
        flat = np.zeros((len(cache) * PAGE, field.nbytes), np.uint8)
        flat[:n] = values.reshape(n, -1).view(np.uint8)
        view[...] = flat.reshape(view.shape)
    return cache


def call(kernel: str | None, q: Array, cache: Array, n: int) -> tuple[Array, Array]:
    """Dense or sparse decode of one request of n tokens, by what the kernel is for; the oracle without one."""
    if kernel and "sparse" in kernel:
        indices = np.broadcast_to(np.arange(n, dtype=np.int32), (1, q.shape[1], n)).copy()
        out, lse = mla_cupy.sparse_mla_decode(q, cache, indices, scale=1.0, out_dtype="float32", kernel=kernel)
        return out[0], lse[0].T
    args = q, cache, np.arange(len(cache), dtype=np.int32)[None], np.array([n], np.int32)
    if kernel is None:
        out, lse = reference.mla_decode(*args, scale=1.0, causal=False)
    else:
        out, lse = mla_cupy.mla_decode(*args, scale=1.0, out_dtype="float32", causal=False, kernel=kernel)
    return out[0], lse[0]


def difference(got: tuple[Array, Array], q: Array, cache: Array, n: int) -> tuple[Array, Array]:
    """Errors of each query's columns, in the root mean square relative to the exact ones; and of each lse."""
    exact, exact_lse = call(None, q, cache, n)
    squares = [(x.reshape(*x.shape[:-1], 4, 128) ** 2).mean(-1) for x in (got[0] - exact, exact)]
    return np.sqrt(squares[0] / squares[1]), np.abs(got[1] - exact_lse)


def errors(gpu: Gpu, q: Array, cache: Array, n: int) -> tuple[Array, Array]:
    """Errors of a run in the simulator."""
    with simulated(1, gpu[1]):
        got = call(gpu[0], q, cache, n)
    return difference(got, q, cache, n)


def queries(h_q: int, logit: float = 1.0) -> Array:
    q = np.zeros((1, 1, h_q, 576), dtypes.numpy_dtype("bfloat16"))
    q[..., LOGIT] = logit
    return q


def scales_for(latent: Array) -> Array:
    largest = np.abs(latent.reshape(len(latent), 4, 128)).max(-1)
    return np.exp2(np.ceil(np.log2(largest / 448)))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("size", [1e-4, 1e-10, 1e6], ids=str)
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_values_of_any_size_keep_their_digits(gpu: Gpu, size: float) -> None:
    rng = np.random.default_rng(1)
    n, h_q = 100, 17 if gpu is GPUS[1] else 3
    latent = rng.standard_normal((n, 512)) * size
    q = queries(h_q)
    q[..., LOGIT] = rng.standard_normal(h_q)
    of_out, of_lse = errors(gpu, q, cache_of(latent, scales_for(latent), rng.standard_normal(n) * 3), n)
    assert of_out.max() < LIMIT
    assert of_lse.max() < 1e-5


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
@pytest.mark.parametrize(
    ("large", "logit"),
    [
        (2.0**3, -1e4),  # the large value weighs nothing
        (2.0**30, -1e4),
        (2.0**3, -13.0),  # and something: weights are e^-13 and 1
        (2.0**40, -40.0),  # a weight that float16 does not have
        (-(2.0**15), 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 40], ids=["same step", "earlier step"])
def test_mixed_scales(gpu: Gpu, large: float, logit: float, first: int) -> None:
    """A token of large values, before, among or after tokens of small ones."""
    rng = np.random.default_rng(2)
    n = 72
    latent, logits = rng.standard_normal((n, 512)) * 2.0**-12, rng.standard_normal(n)
    scales = scales_for(latent)
    for token in (first, n - 1):
        latent[token] *= 2.0**12 * abs(large)
        scales[token] *= 2.0**12 * large
        logits[token] = logit
    of_out, of_lse = errors(gpu, queries(2), cache_of(latent, scales, logits), n)
    assert of_out.max() < LIMIT
    assert of_lse.max() < 1e-5


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
def test_scales_that_are_no_powers_of_two(gpu: Gpu) -> None:
    """Weight, scale and product are rounded, each to float16."""
    rng = np.random.default_rng(8)
    latent = rng.standard_normal((100, 512)) * 1e-4
    scales = np.abs(latent.reshape(100, 4, 128)).max(-1) / 448
    of_out, _ = errors(gpu, queries(2), cache_of(latent, scales, rng.standard_normal(100) * 3), 100)
    assert np.sqrt((of_out**2).mean()) < LIMIT
    assert of_out.max() < 2 * LIMIT  # one token counts most: three roundings of it, of up to 2^-11 each


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
def test_a_group_of_small_values(gpu: Gpu) -> None:
    """Columns with values 2^18 times smaller than others."""
    rng = np.random.default_rng(3)
    latent = rng.standard_normal((40, 512))
    latent[:, 128:256] *= 2.0**-18
    of_out, _ = errors(gpu, queries(2), cache_of(latent, scales_for(latent), rng.standard_normal(40)), 40)
    assert of_out.max() < LIMIT


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e6], ids=str)
def test_huge_scores(gpu: Gpu, size: float) -> None:
    """Scores too large for a float's fractions."""
    rng = np.random.default_rng(4)
    latent = rng.standard_normal((40, 512)) * size
    logits = np.linspace(0.5, 1.0, 40) * 1e12
    q = queries(2)
    exact, exact_lse = call(None, q, cache := cache_of(latent, scales_for(latent), logits), 40)
    with simulated(1, gpu[1]):
        got, lse = call(gpu[0], q, cache, 40)
    np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-4 * size)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(gpu: Gpu) -> None:
    rng = np.random.default_rng(5)
    latent = rng.standard_normal((100, 512)) * np.exp2(rng.integers(-20, 4, 100))[:, None]
    cache = cache_of(latent, scales_for(latent), rng.standard_normal(100) * 20)
    q = queries(16)
    q[..., LOGIT] = rng.standard_normal(16)
    with simulated(1, gpu[1]):
        together, alone = call(gpu[0], q, cache, 100), call(gpu[0], q[:, :, 5:6], cache, 100)
    np.testing.assert_array_equal(together[0][:, 5], alone[0][:, 0])
    np.testing.assert_array_equal(together[1][5], alone[1][0])


@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
@pytest.mark.parametrize("scale", [np.nan, np.inf], ids=str)
def test_a_hidden_scale_is_no_number(gpu: Gpu, scale: float) -> None:
    """The second of two queries sees a token with such a scale."""
    rng = np.random.default_rng(6)
    latent = rng.standard_normal((40, 512))
    scales, q = scales_for(latent), np.repeat(queries(3), 2, axis=1)
    cache = cache_of(latent, scales, rng.standard_normal(40))
    form = FORMATS["v32"]
    view = reference.cache.field_view(cache[:, :, 0], form, form.field("scales"))
    view[0, 39] = np.full(4, scale, np.float32).view(np.uint8)
    args = q, cache, np.zeros((1, 1), np.int32), np.array([40], np.int32)
    exact, _ = mla_cupy.mla_decode(*args, scale=1.0)
    with simulated(1, gpu[1]):
        out, _ = mla_cupy.mla_decode(*args, scale=1.0, kernel=gpu[0])
    assert np.isnan(out[0, 1].astype(np.float32)).all()
    np.testing.assert_allclose(out[0, 0].astype(np.float32), exact[0, 0].astype(np.float32), atol=0.01)


# ---- Planted bugs ----------------------------------------------------------------------------------------------

ROWS = "attention/mma/scaled_rows.cuh"
test_is_caught, test_as_it_is = mutant_suite(
    GPUS[1][0],
    [
        partial(test_mixed_scales, GPUS[1], 2.0**30, -1e4, 0),
        partial(test_mixed_scales, GPUS[1], -(2.0**15), 0.0, 40),
    ],
    {},
    [
        Mutant("sum not rescaled", ROWS, "this->sum *= factor;", ""),
    ],
)


# ---- On a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", in_both_sizes((DENSE[0][0], SPARSE[0][0])))
@pytest.mark.parametrize("h_q", [16, 64])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-10], ids=str)
def test_values_on_a_gpu(hopper: object, kernel: str, h_q: int, size: float) -> None:
    rng, n = np.random.default_rng(7), 2000
    latent = rng.standard_normal((n, 512)) * size * np.exp2(rng.integers(-12, 1, n))[:, None]
    q, cache = queries(h_q), cache_of(latent, scales_for(latent), rng.standard_normal(n) * 3)
    q[..., LOGIT] = rng.standard_normal(h_q)
    of_out, of_lse = difference(call(kernel, q, cache, n), q, cache, n)
    assert of_out.max() < LIMIT
    assert of_lse.max() < 1e-4
