"""Statements of docstrings about corner cases, each checked on the NumPy backend."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import ArgumentError, ShapeError
from tests.support.flat import flat, mla_decode

TABLE = np.zeros((1, 1), np.int32)


def prepared(q: Any, scales: str) -> tuple[np.ndarray[Any, Any], float]:
    """Codes and the scale of one query of 32 elements, turned by nothing."""
    cos, sin = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    x = np.asarray(q).astype(ml_dtypes.bfloat16).reshape(1, 1, 32)
    codes, folded = mla_cupy.indexer_prepare_q(
        x, np.ones((1, 1), np.float32), cos, sin, np.zeros(1, np.int32), hadamard=False, scales=scales
    )
    return codes.view(ml_dtypes.float8_e4m3fn)[0, 0].astype(np.float32), float(folded[0, 0]) * 32**0.5


def test_a_plain_scale_is_a_product() -> None:
    amax = np.float32(1.3125)
    product, quotient = amax * np.float32(1 / 448), amax / np.float32(448)
    assert product != quotient
    _, scale = prepared(np.full(32, amax), "plain")
    assert np.float32(scale) == pytest.approx(product, rel=2e-8) != pytest.approx(quotient, rel=2e-8)


@pytest.mark.parametrize("scales", ["plain", "power_of_2"])
def test_an_infinity_counts_as_the_largest_float(scales: str) -> None:
    codes, scale = prepared([*[1.0] * 31, np.inf], scales)
    assert codes.tolist() == [*[0.0] * 31, 448.0]
    largest = np.finfo(np.float32).max / 448
    assert largest <= scale * 1.0000001 <= 2 * largest


def test_a_tree_without_room_for_all_drafts() -> None:
    """Token t is draft s_q - n + t; other bits have no effect."""
    q = np.ones((1, 4, 1, 576), np.float16)
    cache = np.zeros((1, 8, 576), np.float16)
    cache[0, :2] = [[0.01], [0.02]]
    mask = np.array([[1, 2, 4, 8]], np.uint64)
    lse = [
        mla_decode(q, cache, TABLE, np.array([2], np.int32), tree_mask=bits)[1][0, 0]
        for bits in (mask, mask | np.uint64(1 << 40), mask | np.uint64(3))
    ]
    assert np.isneginf(lse[0][:2]).all()
    assert lse[0][2:] == pytest.approx([576 * 0.01 / 24, 576 * 0.02 / 24], rel=1e-3)
    assert np.array_equal(lse[0], lse[1])
    assert np.array_equal(lse[0], lse[2])


def test_pages_of_v4_with_an_odd_number_of_tokens_need_a_gap() -> None:
    q = np.ones((1, 1, 1, 512), np.float16)
    with pytest.raises(ShapeError, match="multiples of 16 bytes"):
        mla_decode(q, np.zeros((4, 3, 584), np.uint8), TABLE, np.array([2], np.int32))
    page = 3 * 584 + 8
    pool = np.zeros((4, page), np.uint8)
    pages = np.lib.stride_tricks.as_strided(pool, (4, 3, 584), (page, 584, 1))
    assert mla_decode(q, pages, TABLE, np.array([2], np.int32))[0].shape == (1, 1, 1, 512)


def test_lengths_of_logits_are_clamped_after_the_subtraction() -> None:
    """With 9 keys and room for 4, the last but one of 2 tokens sees 8, clamped to 4: not 4 - 1."""
    q, weights = np.full((1, 2, 1, 32), 0x38, np.uint8), np.ones((1, 2, 1), np.float32)
    cache, seqlens = np.zeros((1, 4, 36), np.uint8), np.array([9], np.int32)
    logits = mla_cupy.indexer_logits_paged(q, cache, weights, seqlens, TABLE)
    assert not np.isneginf(logits).any()


@pytest.mark.parametrize("sink", [np.inf, -np.inf])
def test_an_infinite_sink_has_no_gradient(sink: float) -> None:
    rng = np.random.default_rng(0)
    q, kv = rng.standard_normal((2, 1, 576)).astype(np.float16), rng.standard_normal((4, 576)).astype(np.float16)
    indices, sinks = np.array([[0, 1], [2, 3]], np.int32), np.array([sink], np.float32)
    out, lse, _ = mla_cupy.sparse_mla_forward(q, kv, indices, attn_sink=sinks, scale=576**-0.5)
    dout = np.ones_like(out)
    dq, dkv, d_sink = mla_cupy.sparse_mla_backward(q, kv, out, dout, lse, indices, attn_sink=sinks, scale=576**-0.5)
    assert d_sink.tolist() == [0]
    if sink > 0:
        assert not out.any()
        assert not dq.any()
        assert not dkv.any()
    else:
        assert np.array_equal(dkv, mla_cupy.sparse_mla_backward(q, kv, out, dout, lse, indices, scale=576**-0.5)[1])


def test_checked_indices_are_those_that_count() -> None:
    q, kv = np.ones((1, 1, 576), np.float16), np.ones((4, 576), np.float16)
    indices = np.array([[0, 99]], np.int32)
    flat(mla_cupy.sparse_mla_forward)(q, kv, indices, topk_length=np.array([1], np.int32), check=True, scale=576**-0.5)
    with pytest.raises(ArgumentError, match=r"indices\[0, 1\]: got 99"):
        flat(mla_cupy.sparse_mla_forward)(q, kv, indices, check=True, scale=576**-0.5)


def test_a_product_of_zero_passes_no_gradient() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((2, 4, 64), (2, 64)))
    zeros, ones = np.zeros((2, 2, 32), ml_dtypes.bfloat16), np.ones((2, 32), ml_dtypes.bfloat16)
    weights = np.ones((2, 2), np.float32)
    loss = mla_cupy.indexer_warmup_loss(q, k, zeros, ones, weights, scale=0.125)
    positive = mla_cupy.indexer_warmup_loss(q, k, zeros + ml_dtypes.bfloat16(1), ones, weights, scale=0.125)
    assert loss.kl[1] > 0
    assert not loss.d_index_q.any()
    assert positive.d_index_q.any()
