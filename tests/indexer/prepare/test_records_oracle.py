"""The oracle of the indexer's preparation: against other formulas, and at the edges of the formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.reference import indexer_prepare_k, indexer_prepare_q
from mla_cupy.reference.indexer_records import append_records, hadamard_transform, page_parts, quantise, rotate

BF16 = ml_dtypes.bfloat16
PLAIN = {"hadamard": False}


def tables(d_rope: int = 64, length: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin as models make them."""
    angles = np.arange(length)[:, None] * 10000.0 ** -(np.arange(d_rope // 2) / (d_rope // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def without_rope(x: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.zeros((1, 0), np.float32)
    return indexer_prepare_k(x, nothing, nothing, np.zeros(len(x), int), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d_rope", [2, 32, 128])
def test_rope_is_a_complex_rotation(interleaved: bool, d_rope: int) -> None:
    x = np.random.default_rng(0).standard_normal((7, 128)).astype(np.float32)
    cos, sin = tables(d_rope)
    positions = np.array([0, 1, 5, 49, 7, 7, 30])
    got = rotate(x, cos, sin, positions, interleaved, rounded=False).astype(np.float64)
    pairs = x[:, :d_rope].reshape(7, -1, 2) if interleaved else x[:, :d_rope].reshape(7, 2, -1).swapaxes(1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos[positions] + 1j * sin[positions])
    pairs = np.stack([turned.real, turned.imag], axis=-1)
    wanted = pairs.reshape(7, -1) if interleaved else pairs.swapaxes(1, 2).reshape(7, -1)
    np.testing.assert_allclose(got[:, :d_rope], wanted, atol=1e-6)
    assert (got[:, d_rope:] == x[:, d_rope:]).all()


def test_positions_are_clamped() -> None:
    x = np.ones((2, 64), np.float32)
    cos, sin = tables(64, 10)
    got = rotate(x, cos, sin, np.array([-3, 2**31 - 1]), False, False)
    assert (got == rotate(x, cos, sin, np.array([0, 9]), False, False)).all()


@pytest.mark.parametrize("d", [1, 2, 32, 64, 128])
def test_hadamard_is_the_matrix(d: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(d).standard_normal((5, d)).astype(np.float32)
    np.testing.assert_allclose(hadamard_transform(x), x @ matrix.T / math.sqrt(d), atol=2e-6)
    np.testing.assert_allclose(hadamard_transform(hadamard_transform(x)), x, atol=2e-6)


def test_scores_do_not_feel_the_hadamard_transform() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 4, 128)).astype(np.float32)
    np.testing.assert_allclose(hadamard_transform(x) @ hadamard_transform(y).T, x @ y.T, atol=1e-4)


@pytest.mark.parametrize("amax", [0.0, 1e-4, 1e-30, 448.0, np.nextafter(np.float32(448), 1000), 447.9, 896.0, 3e38])
def test_scales(amax: float) -> None:
    """The smallest power of 2 at which the largest magnitude fits; the kernel's formula and logarithms agree."""
    x = np.full((1, 32), -amax, np.float32)
    codes, scales = quantise(x, "power_of_2")
    largest = max(float(np.float32(amax)), float(np.float32(1e-4)))
    assert math.frexp(scales[0])[0] == 0.5
    assert np.float32(largest) * np.float32(1 / 448) <= scales[0] < 2 * largest / 448 * (1 + 1e-6)
    assert np.abs(codes).max() <= 448
    _, plain = quantise(x, "plain")
    assert plain[0] == np.float32(largest) * np.float32(1 / 448)


@pytest.mark.parametrize("scale", ["power_of_2", "plain"])
def test_quantisation_is_close(scale: str) -> None:
    x = np.random.default_rng(3).standard_normal((20, 128)).astype(BF16)
    codes, scales = without_rope(x, scales=scale, **PLAIN)
    exact = x.astype(np.float64)
    bound = np.maximum(np.abs(exact) * 2.0**-4, 2.0**-9 * scales[:, None])
    assert (np.abs(codes * scales[:, None] - exact) <= bound * (1 + 1e-6)).all()


def test_what_is_no_number() -> None:
    """NaN stays where it is and does not touch the scale; infinities saturate."""
    x = np.ones((3, 32), np.float32)
    x[0, 5], x[1, 7], x[1, 8] = np.nan, np.inf, -np.inf
    codes, scales = quantise(x, "power_of_2")
    assert np.isnan(codes[0, 5])
    assert np.isfinite(np.delete(codes[0], 5)).all()
    assert scales[0] == scales[2]
    assert (codes[1, 7], codes[1, 8]) == (448, -448)
    assert np.isfinite(scales).all()


def test_bfloat16_in_between_matters_and_can_be_left_out() -> None:
    x = np.random.default_rng(4).standard_normal((40, 128)).astype(BF16)
    arguments = (x, *tables(), np.arange(40))
    rounded, exact = (indexer_prepare_k(*arguments, reference_rounding=mode)[0] for mode in (True, False))
    assert (rounded != exact).any()
    assert np.abs(rounded - exact).max() <= 32  # one step of e4m3 at most


def test_queries_are_keys_with_their_scales_in_the_weights() -> None:
    rng = np.random.default_rng(5)
    q, weights = rng.standard_normal((6, 3, 64)).astype(BF16), rng.standard_normal((6, 3)).astype(np.float32)
    positions = np.arange(6) * 3
    codes, folded = indexer_prepare_q(q, weights, *tables(32), positions)
    for h in range(3):
        as_key, scales = indexer_prepare_k(q[:, h], *tables(32), positions)
        assert (codes[:, h] == as_key).all()
        np.testing.assert_allclose(folded[:, h], weights[:, h] * scales * 3**-0.5 * 64**-0.5, rtol=3e-7)


@pytest.mark.parametrize("page_size", [1, 64])
def test_records(page_size: int) -> None:
    """Planar within a page, as DeepGEMM lays it out; slots that do not exist are skipped."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-8, 9, (5, 128)).astype(np.float64)
    scales = rng.random(5).astype(np.float32)
    cache = np.full((3, page_size, 132), 0xEE, np.uint8)
    slots = [2 * page_size, -1, page_size - 1, 3 * page_size, page_size]
    append_records(cache, codes, scales, slots)
    whole = cache.reshape(3, -1)
    for at, slot in ((0, slots[0]), (2, slots[2]), (4, slots[4])):
        page, token = divmod(slot, page_size)
        raw = whole[page, 128 * token : 128 * token + 128].view(ml_dtypes.float8_e4m3fn)
        assert (raw.astype(np.float64) == codes[at]).all()
        assert whole[page, 128 * page_size + 4 * token :][:4].view(np.float32)[0] == scales[at]
    written = {slots[0], slots[2], slots[4]}
    parts, _ = page_parts(cache)
    untouched = [n for n in range(3 * page_size) if n not in written]
    assert (parts.view(np.uint8).reshape(-1, 128)[untouched] == 0xEE).all()
