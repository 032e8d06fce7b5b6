"""`PagedKVCache` beside a ledger that follows its docstrings: every method in any order, failures, threads."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.cache.walk import walk, walk_in_threads


@pytest.fixture
def _often_another_thread() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_does_what_it_says(seed: int) -> None:
    walk(seed, 300, 5)


def test_walks_meet_everything() -> None:
    stats = [walk(seed, 200, 50).cache.stats() for seed in range(4, 7)]
    for name in ("copies", "evictions", "prefix_hits"):
        assert sum(getattr(one, name) for one in stats) > 0, name


@pytest.mark.usefixtures("_often_another_thread")
def test_threads() -> None:
    walk_in_threads(0, 400, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_on_a_gpu(gpu: object, seed: int) -> None:
    walk(seed, 300, 5, device=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("_often_another_thread")
def test_threads_on_a_gpu(gpu: object) -> None:
    walk_in_threads(0, 400, 20, device=0)


# A million operations, in parts that run side by side.


@pytest.mark.slow
@pytest.mark.parametrize("part", range(18))
def test_900_000_operations(part: int) -> None:
    for seed in range(50):
        walk(1000 + 50 * part + seed, 1000, 10)


@pytest.mark.slow
@pytest.mark.usefixtures("_often_another_thread")
@pytest.mark.parametrize("part", range(4))
def test_100_000_operations_of_threads(part: int) -> None:
    for seed in range(25):
        walk_in_threads(1000 + 25 * part + seed, 1000, 10)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_operations_on_a_gpu(gpu: object, part: int) -> None:
    for seed in range(10):
        walk(2000 + 10 * part + seed, 2000, 20, device=0)
        walk_in_threads(2000 + 10 * part + seed, 500, 20, device=0)
