"""Rows that are hard to select from: ties, hot digits, what is no number."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_cupy.reference import indexer_topk

Array = np.ndarray[Any, Any]
Results = tuple[Array, Array, Array]


def hard_rows(width: int, seed: int = 0) -> Array:
    """(n, width), float32: one kind of row each."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(width).astype(np.float32)
    one = np.float32(1)
    ladder = (one.view(np.uint32) + rng.permutation(width).astype(np.uint32)).view(np.float32)  # one ulp apart
    hot = (rng.integers(0, 32, width).astype(np.uint32) * 64 << 21).view(np.float32)  # 32 first digits, one bank
    special = rng.choice(np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-45, 3e38], np.float32), width)
    organ = np.minimum(np.arange(width), np.arange(width)[::-1]).astype(np.float32)
    rows = [
        normal,
        np.zeros(width, np.float32),
        rng.choice(np.array([0.0, -0.0], np.float32), width),
        np.maximum(normal, 0),
        np.where(rng.random(width) < 0.3, one, 2 * one),
        ladder,
        hot,
        special,
        np.arange(width, dtype=np.float32),
        -np.arange(width, dtype=np.float32),
        organ,
        np.full(width, np.nan, np.float32),
        np.full(width, -np.inf, np.float32),
        np.where(rng.random(width) < 0.99, np.float32(-np.inf), normal),
        rng.integers(0, 2**32, width, np.uint32).view(np.float32),
    ]
    return np.stack(rows)


def expected(logits: Array, **options: Any) -> Results:
    """The oracle's answer in the dtypes of the public call."""
    indices, counts, values = indexer_topk(logits, **options)
    assert values is not None
    return indices.astype(np.int32), counts.astype(np.int32), values.astype(np.float32)


def assert_selected(got: Results, wanted: Results) -> None:
    """Equal; a NaN is as good as another."""
    for x, y in zip(got, wanted, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)
