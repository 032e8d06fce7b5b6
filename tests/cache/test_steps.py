"""Steps that have been overtaken, several threads that make steps, and what `verify` compares with the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_cupy import ArgumentError, CacheFullError, PagedKVCache
from mla_cupy.cache.memory import HostMemory

SIZES: dict[str, Any] = {"num_pages": 10, "page_size": 4, "max_seqs": 4, "max_pages": 5, "device": "cpu"}


def cache(record: Any = "fp16-nope", **changes: Any) -> PagedKVCache:
    return PagedKVCache(record, **{**SIZES, **changes})


def rows(value: float, count: int = 1) -> Any:
    return np.full((count, 512), value, np.float16).astype("float32")


# ---- Steps that have been overtaken ------------------------------------------------------------------------------


def test_a_step_that_has_been_overtaken_is_refused() -> None:
    """Steps of equal sizes are views of the same arrays: the first one's slots are the second one's by now."""
    made = cache({"kv": "fp16-nope", "indexer": "indexer"})
    a, b = made.allocate()[0], made.allocate()[0]
    first = made.extend([a], 1)
    second = made.extend([b], 1)
    assert first.number < second.number
    message = f"step: got number {first.number}, expected .*number {second.number}, its newest; append before the next"
    with pytest.raises(ArgumentError, match=message):
        made.append(first, 0, rows(1))
    with pytest.raises(ArgumentError, match=message):
        made.append_keys(first, 0, np.ones((1, 128), ml_dtypes.bfloat16))
    assert not made.layer(0).any()
    made.append(second, 0, rows(2))
    made.append_keys(second, 0, np.ones((1, 128), ml_dtypes.bfloat16))
    assert made.layer(0)[int(made.pages(b)[0]), 0, 0] == 2


def test_a_step_of_another_cache_is_refused() -> None:
    one, other = cache(), cache()
    steps = [made.extend([made.allocate()[0]], 1) for made in (one, other)]
    for made, step in ((one, steps[1]), (other, steps[0])):
        with pytest.raises(ArgumentError, match="step: got number"):
            made.append(step, 0, rows(1))
    with pytest.raises(ArgumentError, match="one that `extend` has yet to return"):
        cache().append(steps[0], 0, rows(1))


def test_what_does_not_overtake_a_step() -> None:
    """A step that has not happened, and all that leaves the arrays as they are."""
    made = cache()
    a, _ = made.allocate()
    step = made.extend([a], 3)
    with pytest.raises(CacheFullError, match="pages"):
        made.extend([a, *made.fork(a, 2)], 16)
    with pytest.raises(ArgumentError, match="sequences"):
        made.extend([99])
    (b,) = made.fork(a)
    made.reserve(b, 4)
    made.truncate([b], 1)
    made.free([b])
    made.append(step, 0, rows(1, 3))
    assert made.layer(0)[int(made.pages(a)[0]), :3, 0].tolist() == [1, 1, 1]


class Failing(HostMemory):
    """Fails once the arrays have changed."""

    failing = False

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        super().submit(part, copies, stream)
        if self.failing:
            raise RuntimeError("injected")


def test_a_step_that_failed_while_it_ran_overtakes_the_one_before() -> None:
    made = cache(memory=Failing)
    a, b = made.allocate()[0], made.allocate()[0]
    step = made.extend([a], 1)
    made._memory.failing = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="injected"):
        made.extend([b], 1)
    made._memory.failing = False  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="one that `extend` has yet to return"):
        made.append(step, 0, rows(1))
    made.append(made.extend([a, b], 1), 0, rows(1, 2))
    made.verify(device=True)


# ---- Threads -----------------------------------------------------------------------------------------------------


def run_threads(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("locked", [True, False])
def test_threads_that_write(locked: bool) -> None:
    """Under the lock every append succeeds; without it one may be refused, and is made good by another step."""
    made = cache(num_pages=64, max_seqs=8, max_pages=16)
    mine = [made.allocate()[0] for _ in range(4)]

    def work(number: int) -> None:
        for value in range(40):
            if locked:
                with made.lock:
                    made.append(made.extend([mine[number]], 1), 0, rows(100 * number + value))
                continue
            while True:
                step = made.extend([mine[number]], 1)
                try:
                    made.append(step, 0, rows(100 * number + value))
                    break
                except ArgumentError as error:
                    if not str(error).startswith("step: got number"):
                        raise
                    made.truncate([mine[number]], value)

    run_threads(work, 4)
    made.verify(device=True)
    for number, sequence in enumerate(mine):
        assert made.length(sequence) == 40
        held = made.layer(0)[made.pages(sequence)].reshape(-1, 512)[:40, 0]
        assert held.tolist() == [100 * number + value for value in range(40)]


# ---- Device against host -----------------------------------------------------------------------------------------


def test_verify_finds_what_the_device_has_wrong() -> None:
    made = cache()
    a, b = made.allocate()[0], made.allocate()[0]
    made.extend([a, b], [9, 2])
    made.verify(device=True)
    made.block_table[made.row(a), 2] += 1
    made.verify()
    with pytest.raises(AssertionError, match="row 0, column 2 of the device's block table is page 3, expected 2"):
        made.verify(device=True)
    made.block_table[made.row(a), 2] -= 1
    made.block_table[made.row(a), 3] = 7  # beyond what the sequence has
    made.verify(device=True)
    made.seqlens[made.row(b)] = 1
    with pytest.raises(AssertionError, match="row 1 of the device's seqlens is 1, expected 2"):
        made.verify(device=True)
    made.truncate([b], 1)  # what the device hears with the next step
    made.verify(device=True)
    made.seqlens[3] = 1
    with pytest.raises(AssertionError, match="row 3 of the device's seqlens is 1, expected 0"):
        made.verify(device=True)


def test_verify_finds_rows_that_the_device_is_not_told_of() -> None:
    made = cache()
    a, _ = made.allocate()
    made.extend([a], 1)
    made.reserve(a, 8)
    made.verify(device=True)
    made._book.dirty[:] = False
    with pytest.raises(AssertionError, match="row 0 has pages that the device is not told of"):
        made.verify()


def test_verify_after_every_kind_of_change() -> None:
    made = cache()
    prompt = list(range(6))
    a, _ = made.allocate(prompt)
    changes: tuple[Callable[[], object], ...] = (
        lambda: made.extend([a], 6), lambda: made.commit(a, prompt), lambda: made.allocate(prompt),
        lambda: made.fork(a), lambda: made.reserve(a, 5), lambda: made.extend([], 1), lambda: made.truncate([a], 5),
        lambda: made.extend([a], 1), lambda: made.free([a]), lambda: made.extend([]),
    )  # fmt: skip
    for change in changes:
        change()
        made.verify(device=True)
