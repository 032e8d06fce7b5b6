"""Small weights in decode, as documented in docs/conventions.md."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy import dtypes
from mla_cupy.simulation import simulated


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dtype", "record", "score", "kept"),
    [
        ("float16", True, 18, True),
        ("bfloat16", True, 18, True),
        ("float16", True, 24, False),
        ("bfloat16", True, 24, False),
        ("bfloat16", False, 18, True),
    ],
)
def test_small_weights(dtype: str, record: bool, score: int, kept: bool) -> None:
    """One of two tokens has a score that much larger, and a value of zeros; the other's value is 448."""
    q, rows = np.zeros((1, 1, 16, 576), np.float32), np.zeros((1, 64, 576), np.float32)
    q[..., 512], rows[0, 0, 512], rows[0, 1, :512] = 1, score, 448
    cache = rows.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) if record else rows.astype(dtypes.numpy_dtype(dtype))
    table, lengths = np.zeros((1, 1), np.int32), np.array([2], np.int32)
    with simulated():
        out, _ = mla_cupy.mla_decode(
            q.astype(dtypes.numpy_dtype(dtype)), cache, table, lengths, scale=1.0, out_dtype="float32"
        )
    expected = 448 * np.exp(-float(score)) if kept else 0.0
    np.testing.assert_allclose(out, expected, rtol=0.01)
