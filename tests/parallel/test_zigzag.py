"""Zigzag pieces, and the calls in which their queries meet the keys before them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mla_cupy import ArgumentError, ShapeError
from mla_cupy.parallel import Zigzag
from mla_cupy.parallel.zigzag import Chunk, Segments, check_tokens, schedule, whole

Array = np.ndarray[Any, Any]
_CASES = [((40,), 2), ((64, 24), 4), ((37, 2, 0, 19), 4), ((3,), 5), ((0,), 2), ((9, 9), 1), ((5, 0, 11, 1), 3)]


def _pairs(call: Segments, causal: bool) -> list[tuple[int, int]]:
    """Queries and keys of a call that see each other, by their rows in it."""
    found = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(call.starts_q), itertools.pairwise(call.starts_kv), strict=True):
        for i in range(q0, q1):
            last = k1 - (q1 - 1 - i) if causal else k1
            found += [(call.begin + i, j) for j in range(k0, last)]
    return found


def _gathered(zigzag: Zigzag, chunk: Chunk) -> Array:
    """Rows of a chunk in the order in which its calls read them."""
    padded = np.full((zigzag.world, zigzag.most), -1)
    for rank in range(zigzag.world):
        rows = zigzag.rows(rank)
        padded[rank, : len(rows)] = rows
    return padded.ravel()[chunk.order]


def _causal(zigzag: Zigzag, rank: int) -> Array:
    first, end = zigzag.bounds(rank)
    places = np.arange(zigzag.tokens)
    return (first[:, None] <= places) & (places < end[:, None])


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize(("lengths", "world"), _CASES)
def test_every_pair_once(lengths: tuple[int, ...], world: int, chunk_tokens: int) -> None:
    """Over all calls of a rank, each query meets each key up to its own token exactly once."""
    zigzag = Zigzag(lengths, world)
    every = [schedule(zigzag, rank, chunk_tokens) for rank in range(world)]
    for rank, own in enumerate(every):
        rows = zigzag.rows(rank)
        met = np.zeros((len(rows), zigzag.tokens), int)
        for i, j in _pairs(own.own, causal=True):
            met[i, rows[j]] += 1
        for chunks in zip(*(one.chunks for one in every), strict=True):
            keys = _gathered(zigzag, chunks[rank])
            for call in chunks[rank].calls:
                pairs = _pairs(call, causal=False)
                assert call.is_empty is (not pairs)
                assert (call.starts_q[-1], call.starts_kv[-1]) == (call.end - call.begin, len(keys))
                for i, j in pairs:
                    met[i, keys[j]] += 1
        np.testing.assert_array_equal(met, _causal(zigzag, rank))


@pytest.mark.parametrize(("lengths", "world"), _CASES)
def test_all_keys_in_order(lengths: tuple[int, ...], world: int) -> None:
    """Two causal calls over all keys cover the same pairs."""
    zigzag = Zigzag(lengths, world)
    every = [whole(zigzag, rank) for rank in range(world)]
    for rank, chunk in enumerate(every):
        np.testing.assert_array_equal(_gathered(zigzag, chunk), np.arange(zigzag.tokens))
        met = np.zeros((len(zigzag.rows(rank)), zigzag.tokens), int)
        for pair in (pair for call in chunk.calls for pair in _pairs(call, causal=True)):
            met[pair] += 1
        np.testing.assert_array_equal(met, _causal(zigzag, rank))


@pytest.mark.parametrize(("lengths", "world"), _CASES)
def test_join_is_the_inverse_of_split(lengths: tuple[int, ...], world: int) -> None:
    zigzag = Zigzag(lengths, world)
    x = np.random.default_rng(0).standard_normal((zigzag.tokens, 3))
    parts = [zigzag.split(x, rank) for rank in range(world)]
    np.testing.assert_array_equal(zigzag.join(np.concatenate(parts)), x)
    ids = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(world):
        np.testing.assert_array_equal(zigzag.positions(rank), zigzag.split(ids, rank))


def test_ranks_have_equal_work() -> None:
    """With even pieces, all ranks have equally many pairs and rows."""
    zigzag = Zigzag((48, 96), 4)
    assert zigzag.is_even
    assert not Zigzag((48, 97), 4).is_even
    assert len({_causal(zigzag, rank).sum() for rank in range(4)}) == 1
    assert len({len(zigzag.rows(rank)) for rank in range(4)}) == 1


def test_chunks_are_bounded() -> None:
    chunks = schedule(Zigzag((640,), 4), 1, 100).chunks
    assert max(len(chunk.order) for chunk in chunks) <= 100
    assert sum(len(chunk.order) for chunk in chunks) == 640


def test_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"lengths: got \(\)"):
        Zigzag((), 2)
    with pytest.raises(ArgumentError, match="world: got 0"):
        Zigzag((4,), 0)
    with pytest.raises(ArgumentError, match="rank: got 2"):
        Zigzag((4,), 2).rows(2)
    with pytest.raises(ShapeError, match=r"x\.shape\[0\]: got 3, expected 4"):
        Zigzag((4,), 2).split(np.zeros(3), 0)
    with pytest.raises(ShapeError, match=r"q\.shape\[0\]: got 4, expected 2"):
        check_tokens("q", 4, Zigzag((4,), 2), 0)
    assert Zigzag((np.int64(4),), 2) == Zigzag((4,), 2)  # type: ignore[arg-type]
