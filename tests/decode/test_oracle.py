"""The decode oracle against loops over Python numbers, closed forms, and poison where it must not look."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mla_cupy.dtypes import round_to
from mla_cupy.errors import ArgumentError, ShapeError
from mla_cupy.reference import merge_states, mla_decode
from tests.support.cases import D_QK, D_V, DecodeCase, make

SCALE = D_QK**-0.5


def by_loops(q, kv_cache, block_table, seqlens, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one number at a time."""
    b, s_q, h_q, _ = q.shape
    num_pages, page_size, _, _ = kv_cache.shape
    out, lse = np.zeros((b, s_q, h_q, D_V)), np.full((b, h_q, s_q), -np.inf)
    for i, t, h in np.ndindex(b, s_q, h_q):
        query, length = q[i, t, h].astype(float).tolist(), int(seqlens[i])
        scores, values = [], []
        for j in range(length):
            page = int(block_table[i, j // page_size])
            if (causal and j > t + length - s_q) or not 0 <= page < num_pages:
                continue
            key = kv_cache[page, j % page_size, 0].astype(float).tolist()
            scores.append(SCALE * math.fsum(a * c for a, c in zip(query, key, strict=True)))
            values.append(key[:D_V])
        if scores:
            weights = [math.exp(score - max(scores)) for score in scores]
            total = math.fsum(weights)
            lse[i, h, t] = max(scores) + math.log(total)
            out[i, t, h] = np.asarray(weights) @ np.asarray(values) / total
    return out, lse


def dense(tokens: np.ndarray, q: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decode one sequence whose tokens (n, d) fill one page; q is (s_q, h_q, d)."""
    return mla_decode(q[None], tokens[None], np.zeros((1, 1), np.int32), np.array([len(tokens)]), **options)


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(h_q=3, page_size=64, seqlens=(70, 0, 64)),
        DecodeCase(h_q=4, page_size=24, seqlens=(1, 49, 24), dtype="float16", strides="odd"),
        DecodeCase(h_q=2, s_q=3, page_size=1, seqlens=(5, 2, 40)),
        DecodeCase(h_q=2, s_q=3, page_size=24, seqlens=(50, 3, 1), causal=False),
        DecodeCase(h_q=4, s_q=2, page_size=16, seqlens=(64, 33, 48), missing_pages=2, strides="dense"),
        DecodeCase(b=2, h_q=6, s_q=2, page_size=7, seqlens=(30, 14), missing_pages=1, causal=False),
    ],
    ids=lambda case: case.id,
)
def test_equals_loops_over_numbers(case: DecodeCase) -> None:
    inputs = make(case)
    expected_out, expected_lse = by_loops(*inputs.arguments, case.causal)
    out, lse = inputs.exact
    assert out.dtype == lse.dtype == np.float64
    assert np.isfinite(expected_out).all()
    np.testing.assert_allclose(out, expected_out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_one_key_gives_its_value_and_its_score() -> None:
    token, q = gaussian(1, D_QK), gaussian(1, 5, D_QK, seed=1)
    out, lse = dense(token, q)
    assert np.array_equal(out, np.broadcast_to(token[0, :D_V], (1, 1, 5, D_V)))
    np.testing.assert_allclose(lse[0, :, 0], SCALE * q[0] @ token[0], rtol=1e-13)


def test_a_zero_query_averages_the_values() -> None:
    tokens = gaussian(77, D_QK)
    out, lse = dense(tokens, np.zeros((1, 2, D_QK)))
    np.testing.assert_allclose(out[0, 0, 1], tokens[:, :D_V].mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, math.log(77), rtol=1e-14)


def test_equal_keys_give_their_value() -> None:
    token, q = gaussian(1, D_QK), gaussian(1, 2, D_QK, seed=1)
    one, one_lse = dense(token, q)
    out, lse = dense(np.repeat(token, 65, axis=0), q)
    np.testing.assert_allclose(out, one, rtol=1e-13)
    np.testing.assert_allclose(lse, one_lse + math.log(65), rtol=1e-13)


def test_huge_scores_pick_one_key_without_overflow() -> None:
    tokens, q = gaussian(9, D_QK), 1e6 * gaussian(1, 1, D_QK, seed=1)
    out, lse = dense(tokens, q)
    scores = SCALE * tokens @ q[0, 0]
    assert np.array_equal(out[0, 0, 0], tokens[np.argmax(scores), :D_V])
    np.testing.assert_allclose(lse, scores.max(), rtol=1e-12)


def test_scale_and_value_width() -> None:
    tokens, q = gaussian(9, 24), gaussian(1, 2, 24, seed=1)
    out, lse = dense(tokens, q, d_v=16, scale=0.25)
    other_out, other_lse = dense(tokens, q * (0.25 * math.sqrt(24)), d_v=16)
    assert out.shape == (1, 1, 2, 16)
    np.testing.assert_allclose(out, other_out, rtol=1e-12)
    np.testing.assert_allclose(lse, other_lse, rtol=1e-12)


def test_a_cache_without_head_axis() -> None:
    case = DecodeCase(h_q=2, seqlens=(70, 3, 0))
    flat = make(DecodeCase(h_q=2, seqlens=(70, 3, 0), head_axis=False))
    assert flat.kv_cache.ndim == 3
    assert np.array_equal(flat.exact[0], make(case).exact[0])


@pytest.mark.parametrize("rounding", [None, "bfloat16"])
def test_rows_without_a_key(rounding: str | None) -> None:
    inputs = make(DecodeCase(s_q=3, h_q=2, seqlens=(0, 2, 70)))
    out, lse = mla_decode(*inputs.arguments, rounding=rounding)
    sees_nothing = np.zeros((3, 3), bool)
    sees_nothing[0] = sees_nothing[1, 0] = True  # two tokens for three queries: the first has none
    assert np.array_equal(np.all(out == 0, axis=(2, 3)), sees_nothing)
    assert np.array_equal(np.all(np.isneginf(lse), axis=1), sees_nothing)

    _, other = mla_decode(*inputs.arguments, rounding=rounding, empty_lse=math.inf, lse_base="2")
    assert np.array_equal(np.all(np.isposinf(other), axis=1), sees_nothing)


def test_lse_base_2() -> None:
    inputs = make(DecodeCase(h_q=2, seqlens=(70, 3, 1)))
    np.testing.assert_allclose(
        mla_decode(*inputs.arguments, lse_base="2")[1], inputs.exact[1] / math.log(2), rtol=1e-14
    )


def test_causal_rows_equal_shorter_sequences() -> None:
    inputs = make(DecodeCase(s_q=4, h_q=2, seqlens=(130, 4, 65)))
    out, lse = inputs.exact
    for t in range(4):
        alone = mla_decode(inputs.q[:, t : t + 1], *inputs.arguments[1:3], inputs.seqlens - (3 - t))
        np.testing.assert_allclose(out[:, t], alone[0][:, 0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[:, :, t], alone[1][:, :, 0], rtol=1e-12)


def test_without_causal_every_row_sees_the_whole_sequence() -> None:
    inputs = make(DecodeCase(s_q=2, h_q=2, seqlens=(130, 4, 65)))
    out, _ = mla_decode(*inputs.arguments, causal=False)
    alone, _ = mla_decode(inputs.q[:, :1], *inputs.arguments[1:])
    np.testing.assert_allclose(out[:, 0], alone[:, 0], rtol=1e-12, atol=1e-13)
    assert np.abs(out[:, 0] - inputs.exact[0][:, 0]).max() > 1e-3


def test_lengths_are_clamped() -> None:
    inputs = make(DecodeCase(b=2, h_q=2, seqlens=(128, 128), spare_pages=0))
    table = np.ascontiguousarray(inputs.block_table[:, :2])  # no room beyond 128 tokens
    full = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens)
    out, lse = mla_decode(inputs.q, inputs.kv_cache, table, np.array([2**31 - 1, -(2**31)], np.int32))
    assert np.array_equal(out[0], full[0][0])
    assert np.array_equal(lse[0], full[1][0])
    assert np.all(out[1] == 0)
    assert np.all(np.isneginf(lse[1]))


def test_entries_past_the_end_have_no_effect() -> None:
    inputs = make(DecodeCase(h_q=2, seqlens=(64, 1, 128)))
    table = inputs.block_table.copy()
    table[0, 1:], table[1, 1:], table[2, 2:] = table[2, 0], table[0, 0], table[1, 0]  # pages that exist
    assert not np.array_equal(table, inputs.block_table)
    out, lse = mla_decode(inputs.q, inputs.kv_cache, table, inputs.seqlens)
    assert np.array_equal(out, inputs.exact[0])
    assert np.array_equal(lse, inputs.exact[1])


@pytest.mark.parametrize("page", [-1, -(2**31), 9, 2**31 - 1])
def test_a_sequence_of_missing_pages_is_empty(page: int) -> None:
    pool = gaussian(9, 4, D_QK)
    out, lse = mla_decode(gaussian(1, 1, 2, D_QK), pool, np.full((1, 3), page, np.int32), np.array([11]))
    assert np.all(out == 0)
    assert np.all(np.isneginf(lse))


@pytest.mark.parametrize("rounding", [None, "float16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_reaches_only_the_queries_that_see_it(poison: float, rounding: str | None) -> None:
    inputs = make(DecodeCase(s_q=3, h_q=4, seqlens=(130, 70, 9), dtype="float16"))
    clean_out, clean_lse = mla_decode(*inputs.arguments, rounding=rounding)
    cache = inputs.kv_cache.copy()
    page, offset = inputs.block_table[0, 128 // 64], 128 % 64
    cache[page, offset] = poison  # token 128 of 130: queries 1 and 2 see it

    out, lse = mla_decode(inputs.q, cache, *inputs.arguments[2:], rounding=rounding)
    hit = np.zeros(out.shape[:3], bool)
    hit[0, 1:] = True
    assert np.array_equal(out[~hit], clean_out[~hit])
    assert not np.isfinite(out[hit]).any()
    hit_lse = np.swapaxes(hit, 1, 2)
    assert np.array_equal(lse[~hit_lse], clean_lse[~hit_lse])
    assert np.isnan(lse[hit_lse]).all()


def test_a_poisoned_query_spoils_its_own_row_only() -> None:
    inputs = make(DecodeCase(s_q=2, h_q=3, seqlens=(70, 3, 9)))
    q = inputs.q.copy()
    q[1, 0, 2, 570] = np.nan
    out, _ = mla_decode(q, *inputs.arguments[1:])
    hit = np.zeros(out.shape[:3], bool)
    hit[1, 0, 2] = True
    assert np.isnan(out[hit]).all()
    assert np.array_equal(out[~hit], inputs.exact[0][~hit])


@pytest.mark.parametrize("rounding", [None, "bfloat16"])
def test_keys_of_score_minus_infinity_have_no_weight(rounding: str | None) -> None:
    tokens, q = gaussian(70, D_QK).astype(np.float32), gaussian(1, 2, D_QK, seed=1).astype(np.float32)
    q[..., -1] = 1
    expected = dense(tokens[66:], q)
    tokens[:66, -1] = -np.inf
    out, lse = dense(tokens, q, rounding=rounding)
    np.testing.assert_allclose(out, expected[0], atol=1e-2)
    np.testing.assert_allclose(lse, expected[1], atol=1e-4)

    out, lse = dense(tokens[:66], q, rounding=rounding)
    assert np.all(out == 0)
    assert np.all(np.isneginf(lse))


def test_bad_arguments() -> None:
    with pytest.raises(ShapeError, match=r"kv_cache.shape: .*\(num_pages, 1, page_size, width\)"):
        mla_decode(gaussian(1, 1, 3, 8), gaussian(1, 4, 2, 8), np.zeros((1, 1), int), np.ones(1, int), d_v=4)
    with pytest.raises(ArgumentError, match="lse_base"):
        dense(gaussian(3, 8), gaussian(1, 1, 8), d_v=4, lse_base="10")


# ---- the rounding mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 2**-12, 2**-6), ("float16", 2**-15, 2**-9)])
@pytest.mark.parametrize("case", [DecodeCase(b=2, h_q=8, seqlens=(700, 65)), DecodeCase(s_q=2, h_q=4, page_size=24)])
def test_rounding_errs_as_its_format_does(case: DecodeCase, dtype: str, least: float, most: float) -> None:
    case = DecodeCase(**{**vars(case), "dtype": dtype})
    inputs = make(case)
    (out, lse), (rounded, rounded_lse) = inputs.exact, inputs.rounded
    error = np.abs(rounded - out).max() / np.abs(out).max()
    assert least < error < most
    assert np.array_equal(round_to(rounded, dtype), rounded)
    finite = np.isfinite(lse)
    assert np.array_equal(finite, np.isfinite(rounded_lse))
    lse_error = np.abs(rounded_lse[finite] - lse[finite]).max()
    assert 0 < lse_error < 1e-4  # sums of float32, not of the 16-bit format


def test_rounding_rounds_the_weights_and_not_their_sum() -> None:
    # Two keys with weights 1 and 0.3, values 0 and 1; the query is float32, so that `out` is not rounded.
    tokens = np.zeros((2, 8), np.float32)
    tokens[1, 0], tokens[1, 7] = 1, math.log(0.3)
    q = np.zeros((1, 1, 8), np.float32)
    q[..., 7] = 1
    out, lse = dense(tokens, q, d_v=4, scale=1.0, rounding="bfloat16")
    np.testing.assert_allclose(out[0, 0, 0, 0], 0.30078125 / 1.3, rtol=1e-6)
    np.testing.assert_allclose(lse, math.log(1.3), rtol=1e-6)


@pytest.mark.parametrize("boost", [0.2, 10.0])
def test_rounding_is_relative_to_a_running_maximum(boost: float) -> None:
    # The second block of 64 raises the maximum, by a little or out of sight: what the first one summed must shrink by
    # the same factor, and the later ones must not grow.
    tokens = gaussian(200, D_QK).astype(np.float32)
    q = gaussian(1, 2, D_QK, seed=1).astype(np.float32)
    tokens[64:128] += boost * q[0, 0]
    exact = dense(tokens, q)
    assert np.argmax(tokens @ q[0, 0]) in range(64, 128)
    rounded = dense(tokens, q, rounding="float16")
    np.testing.assert_allclose(rounded[0], exact[0], atol=2e-3)
    np.testing.assert_allclose(rounded[1], exact[1], rtol=1e-5)


def test_rounding_of_one_key_is_exact() -> None:
    inputs = make(DecodeCase(b=1, h_q=4, seqlens=1))
    assert np.array_equal(inputs.rounded[0], inputs.exact[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_merged_ranks_see_what_one_does(world: int, causal: bool) -> None:
    for length in (1, 2, 4, 7, 30):
        tokens, q = gaussian(length, D_QK, seed=length), gaussian(4, 2, D_QK, seed=1)
        lengths = np.array([length])
        parts = []
        for rank in range(world):
            page = np.full((1, 40, D_QK), np.nan)
            page[0, : len(tokens[rank::world])] = tokens[rank::world]
            options = {"cp_world": world, "cp_rank": rank, "causal": causal}
            parts.append(mla_decode(q[None], page, np.zeros((1, 1), np.int32), lengths, **options))
        merged = merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
        for got, expected in zip(merged, dense(tokens, q, causal=causal), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
