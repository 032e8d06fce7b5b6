"""Errors list what the call accepts: widths of the array's own dtype, pairs that go together, records that are read."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mla_cupy
from mla_cupy.errors import ArgumentError, ShapeError

BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(BFLOAT16, "576 or 512 or 320 or 288 for bfloat16"), (np.uint8, "656 or 584 or .* for uint8")],
)
def test_widths_of_a_cache_are_those_of_its_dtype(dtype: Any, expected: str) -> None:
    q, table = np.zeros((1, 1, 16, 576), BFLOAT16), np.zeros((1, 1), np.int32)
    with pytest.raises(ShapeError, match=rf"kv_cache.shape\[-1\]: got 700, expected {expected}$"):
        mla_cupy.mla_decode(q, np.zeros((1, 64, 1, 700), dtype), table, np.ones(1, np.int32), scale=0.1)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 192), (200, 128), (64, 64), (128, 256)])
def test_widths_of_prefill_come_in_pairs(d_qk: int, d_v: int) -> None:
    q, v = np.zeros((8, 2, d_qk), BFLOAT16), np.zeros((8, 2, d_v), BFLOAT16)
    with pytest.raises(ShapeError, match=r"\(192, 128\), \(256, 256\) or \(128, 128\)"):
        mla_cupy.mla_prefill(q, q, v, scale=0.1)


def test_sparse_decode_lists_the_records_that_it_reads() -> None:
    q, indices = np.zeros((1, 1, 16, 576), BFLOAT16), np.zeros((1, 1, 64), np.int32)
    with pytest.raises(ShapeError) as caught:
        mla_cupy.sparse_mla_decode(q, np.zeros((1, 64, 1, 700), np.uint8), indices, scale=0.1)
    listed = "(v32), 656 of uint8 (v32-nope), 584 of uint8 (v4), 528 of uint8 (v41), 288 of uint8 (v41-fp4),"
    assert listed in str(caught.value)
    assert "bf16" not in str(caught.value)


def test_a_stride_of_0_is_no_positive_multiple() -> None:
    q, v = np.zeros((8, 2, 192), BFLOAT16), np.zeros((8, 2, 128), BFLOAT16)
    out = np.lib.stride_tricks.as_strided(v, (8, 2, 128), (0, 256, 2))
    with pytest.raises(ShapeError, match=r"out.strides: got \(0, 128, 1\), .* positive multiples of 16 bytes"):
        mla_cupy.mla_prefill(q, q, v, scale=0.1, out=out)


def test_caches_name_their_arguments() -> None:
    cache = mla_cupy.PagedKVCache("bf16", num_pages=8, page_size=16, max_seqs=4, max_pages=4, device="cpu")
    (sequence, _) = cache.allocate()
    with pytest.raises(ArgumentError, match=r"^layer: got 5"):
        cache.layer(5)
    with pytest.raises(ArgumentError, match=r"^counts: got -1, expected 0 to .*; truncate shortens"):
        cache.extend([sequence], -1)
    with pytest.raises(ArgumentError, match=r"^tokens: got 'hello', expected a list of integers$"):
        cache.allocate("hello")  # type: ignore[arg-type]
    for never in (sequence + 1, sequence + 400, -1):
        with pytest.raises(ArgumentError, match=r"expected one that `allocate` or `fork` returned$"):
            cache.free([never])
    cache.free([sequence])
    with pytest.raises(ArgumentError, match=r"it has been freed$"):
        cache.free([sequence])
    with pytest.raises(ArgumentError, match=r"it has been freed$"):
        cache.length(sequence)
