"""The top-k on a GPU against the oracle, index by index, with rows as long as they get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy.kernels.indexer import topk
from mla_cupy.ops.call import forget
from tests.indexer.topk.topk_cases import Array, assert_selected, expected, hard_rows
from tests.support.gpu import upload

pytestmark = pytest.mark.gpu


def select(logits: Array, **options: Any) -> Any:
    import cupy

    uploaded = {name: upload(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return tuple(cupy.asnumpy(x) for x in mla_cupy.indexer_topk(upload(logits), **uploaded))


@pytest.mark.parametrize("order", ["index", "value"])
@pytest.mark.parametrize("k", [1, 511, 2048, 8192])
@pytest.mark.parametrize("width", [300, 4096, 32768, 32769, 131_072])
def test_hard_rows(gpu: object, width: int, k: int, order: str) -> None:
    logits = hard_rows(width, seed=k)
    assert_selected(select(logits, k=k, order=order), expected(logits, k=k, order=order))


@pytest.mark.parametrize("rows", [1, 200])
def test_causal_ranges(gpu: object, rows: int) -> None:
    """Many and few rows; ends at every alignment; every number of keys about k."""
    rng = np.random.default_rng(rows)
    logits = rng.integers(-50, 50, (rows, 6000)).astype(np.float32)
    ends = rng.integers(0, 6001, rows).astype(np.int32)
    ends[: min(rows, 100)] = 1998 + np.arange(min(rows, 100))
    starts = rng.integers(-5, 40, rows).astype(np.int32)
    options: dict[str, Any] = {"ks": starts, "ke": ends, "k": 2000}
    assert_selected(select(logits, **options), expected(logits, **options))
    assert_selected(
        select(logits, **options, keep_first=4, keep_last=64), expected(logits, **options, keep_first=4, keep_last=64)
    )


def take_rows(monkeypatch: pytest.MonkeyPatch, clusters: bool) -> None:
    """Let a block take each row from now on, or a cluster."""
    monkeypatch.setattr(topk.select, "in_clusters", lambda problem, device: clusters)
    forget()


@pytest.mark.parametrize("width", [300, 4096, 32768])
def test_short_rows_of_clusters(hopper: object, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    take_rows(monkeypatch, clusters=True)
    logits = hard_rows(width)
    assert_selected(select(logits, k=511), expected(logits, k=511))


def test_long_rows_of_one_block(gpu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    take_rows(monkeypatch, clusters=False)
    logits = hard_rows(131_072)[:4]
    assert_selected(select(logits, k=2048), expected(logits, k=2048))


def test_repeats_and_builds_agree_bit_by_bit(hopper: object, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    logits = cupy.maximum(cupy.random.default_rng(0).standard_normal((8, 50_000), dtype=cupy.float32), 0.5)
    first = mla_cupy.indexer_topk(logits, 2048)
    for turn in range(50):
        again = mla_cupy.indexer_topk(logits, 2048)
        assert all(bool((x == y).all()) for x, y in zip(first, again, strict=True))
        if turn == 24:
            take_rows(monkeypatch, clusters=False)
