"""Merging partial attention: equal to the whole, and deaf to what empty states hold."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from mla_cupy.errors import ArgumentError
from mla_cupy.reference import merge_states, mla_decode

D = 24


def states(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n random states of shape b 2, s_q 3, h_q 4, d_v 5."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 2, 3, 4, 5)), 3 * rng.standard_normal((n, 2, 4, 3))


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("cuts", [(40,), (1, 2, 3), (0, 16, 16, 99), (100,), ()])
def test_merged_splits_equal_the_whole(cuts: tuple[int, ...], lse_base: str) -> None:
    rng = np.random.default_rng(len(cuts))
    tokens, q = rng.standard_normal((100, D)), 2 * rng.standard_normal((1, 2, 4, D))

    def attend(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        piece = np.concatenate([tokens[first:last], np.full((1, D), np.nan)])[None]  # a page, its tail unused
        return mla_decode(
            q, piece, np.zeros((1, 1), int), np.array([last - first]), d_v=16, causal=False, lse_base=lse_base
        )

    bounds = [0, *cuts, 100]
    parts = [attend(first, last) for first, last in itertools.pairwise(bounds)]
    out, lse = merge_states(*map(np.stack, zip(*parts, strict=True)), lse_base=lse_base)
    whole_out, whole_lse = attend(0, 100)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, whole_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-13)


def test_by_hand() -> None:
    outs = np.array([2.0, 10.0]).reshape(2, 1, 1, 1, 1)
    lses = np.log([1.0, 3.0]).reshape(2, 1, 1, 1)
    out, lse = merge_states(outs, lses)
    np.testing.assert_allclose(out.item(), (1 * 2 + 3 * 10) / 4, rtol=1e-15)
    np.testing.assert_allclose(lse.item(), math.log(4), rtol=1e-15)


def test_one_state_stays() -> None:
    outs, lses = states(1)
    out, lse = merge_states(outs, lses)
    np.testing.assert_allclose(out, outs[0], rtol=1e-15)
    np.testing.assert_allclose(lse, lses[0], rtol=1e-15)


def test_the_order_and_the_grouping_do_not_matter() -> None:
    outs, lses = states(5)
    out, lse = merge_states(outs, lses)
    first = merge_states(outs[:2], lses[:2])
    rest = merge_states(outs[:1:-1], lses[:1:-1])
    grouped = merge_states(np.stack([rest[0], first[0]]), np.stack([rest[1], first[1]]))
    np.testing.assert_allclose(grouped[0], out, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(grouped[1], lse, rtol=1e-12)


@pytest.mark.parametrize("empty", [np.inf, -np.inf])
@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_empty_rows_are_not_read(empty: float, junk: float) -> None:
    outs, lses = states(3)
    lses[1, 0, 2, 1], outs[1, 0, 1, 2] = empty, junk
    out, lse = merge_states(outs, lses)
    expected_out, expected_lse = merge_states(outs[::2], lses[::2])
    np.testing.assert_allclose(out[0, 1, 2], expected_out[0, 1, 2], rtol=1e-14)
    np.testing.assert_allclose(lse[0, 2, 1], expected_lse[0, 2, 1], rtol=1e-14)
    assert np.isfinite(out).all()
    assert not np.allclose(out[0, 0, 0], expected_out[0, 0, 0])  # the other rows do read state 1


def test_rows_empty_everywhere() -> None:
    outs, lses = states(2)
    outs[:, 1, 2, 3], lses[:, 1, 3, 2] = np.nan, [np.inf, -np.inf]
    for empty_lse in (-math.inf, math.inf):
        out, lse = merge_states(outs, lses, lse_base="2", empty_lse=empty_lse)
        assert np.all(out[1, 2, 3] == 0)
        assert lse[1, 3, 2] == empty_lse
        assert np.isfinite(np.delete(lse.ravel(), np.ravel_multi_index((1, 3, 2), lse.shape))).all()


def test_no_states_are_an_empty_row() -> None:
    out, lse = merge_states(np.zeros((0, 1, 2, 3, 4)), np.zeros((0, 1, 3, 2)))
    assert out.shape == (1, 2, 3, 4)
    assert np.all(out == 0)
    assert lse.shape == (1, 3, 2)
    assert np.all(np.isneginf(lse))


def test_large_lse_do_not_overflow() -> None:
    outs, lses = states(3)
    out, lse = merge_states(outs, lses + 5000.0)
    expected = merge_states(outs, lses)
    np.testing.assert_allclose(out, expected[0], rtol=1e-9)
    np.testing.assert_allclose(lse, expected[1] + 5000.0, rtol=1e-12)


def test_nan_stays_in_its_row() -> None:
    outs, lses = states(3)
    lses[2, 1, 0, 2] = np.nan
    out, lse = merge_states(outs, lses)
    assert np.array_equal(np.isnan(out).all(axis=-1), np.isnan(out).any(axis=-1))
    assert np.argwhere(np.isnan(out[..., 0])).tolist() == [[1, 2, 0]]
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 0, 2]]


def test_16_bit_states() -> None:
    outs, lses = states(2)
    narrow = outs.astype(ml_dtypes.bfloat16)
    out, _ = merge_states(narrow, lses.astype(np.float32))
    expected, _ = merge_states(narrow.astype(np.float64), lses.astype(np.float32).astype(np.float64))
    assert np.array_equal(out, expected)


def test_an_unknown_base_is_refused() -> None:
    with pytest.raises(ArgumentError, match="lse_base"):
        merge_states(*states(1), lse_base="10")
