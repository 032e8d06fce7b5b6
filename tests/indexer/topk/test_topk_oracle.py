"""The oracle of the top-k: against sorting by hand, and its total order."""

from __future__ import annotations

import numpy as np
import pytest

from mla_cupy.reference import indexer_topk
from mla_cupy.reference.indexer_topk import order_keys

INF, NAN = np.inf, np.nan


def test_the_order() -> None:
    """The order from the last to the first; equal logits have equal keys."""
    ladder = np.array([NAN, -INF, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, INF], np.float32)
    assert (np.diff(order_keys(ladder).astype(np.int64)) > 0).all()
    minus_zero, minus_nan = order_keys(np.array([-0.0, -NAN], np.float32))
    assert minus_zero == order_keys(ladder)[5]
    assert minus_nan == 0


def brute(row: list[float], k: int) -> list[int]:
    """Selection by a sort with each rule written out."""
    return sorted(range(len(row)), key=lambda s: (np.isnan(row[s]), -row[s] if not np.isnan(row[s]) else 0, s))[:k]


@pytest.mark.parametrize("k", [1, 3, 7, 40])
def test_against_sorting(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = rng.choice(np.array([0.0, -0.0, 1.0, -1.0, 2.5, INF, -INF, NAN], np.float32), (20, 30))
    indices, counts, values = indexer_topk(rows, k=k, order="value")
    assert values is not None
    for t, row in enumerate(rows):
        wanted = brute(list(row), k)
        assert indices[t, : len(wanted)].tolist() == wanted
        assert counts[t] == len(wanted)
        assert np.array_equal(values[t, : counts[t]], row[wanted], equal_nan=True)
        assert (indices[t, counts[t] :] == -1).all()
        assert np.isneginf(values[t, counts[t] :]).all()
    ascending, _, _ = indexer_topk(rows, k=k)
    assert all(ascending[t, :n].tolist() == sorted(indices[t, :n]) for t, n in enumerate(counts))


def test_ranges_and_bases() -> None:
    rows = np.arange(12, dtype=np.float32)[None].repeat(4, 0)
    ks, ke = np.array([3, -9, 5, 8]), np.array([7, 10**9, 5, 2])
    indices, counts, _ = indexer_topk(rows, ks, ke, k=3)
    assert indices.tolist() == [[4, 5, 6], [9, 10, 11], [-1] * 3, [-1] * 3]
    assert counts.tolist() == [3, 3, 0, 0]
    relative, _, _ = indexer_topk(rows, ks, ke, k=3, relative=True)
    assert relative[0].tolist() == [1, 2, 3]


def test_pages() -> None:
    rows = np.arange(12, dtype=np.float32)[None].repeat(4, 0)
    table = np.array([[7, 3], [2, 5]], np.int32)
    indices, _, _ = indexer_topk(rows, ke=np.array([4, 8, 8, 12]), block_table=table, k=2, page_size=4)
    assert indices.tolist() == [[30, 31], [14, 15], [22, 23], [-1, -1]]


def test_forced_keys() -> None:
    rows = np.arange(10, dtype=np.float32)[None]
    assert indexer_topk(rows, k=4, keep_first=2, keep_last=1)[0].tolist() == [[0, 1, 8, 9]]
    assert indexer_topk(rows, k=4, keep_first=2, order="value")[0].tolist() == [[0, 1, 9, 8]]
    assert indexer_topk(rows, k=3, keep_first=20, keep_last=20)[0].tolist() == [[0, 1, 2]]
    _, _, values = indexer_topk(rows, k=2, keep_first=2)
    assert values is not None
    assert values.tolist() == [[0, 1]]


def test_places_in_a_table_without_pages() -> None:
    """Every key is past the table's end."""
    table = np.zeros((1, 0), np.int32)
    indices, counts, _ = indexer_topk(np.ones((1, 4), np.float32), k=2, block_table=table)
    assert indices.tolist() == [[-1, -1]]
    assert counts.tolist() == [2]
