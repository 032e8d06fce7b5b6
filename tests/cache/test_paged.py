"""`PagedKVCache` by example: what each call returns, what it refuses, threads, attention over its arrays."""

from __future__ import annotations

import random
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mla_cupy
from mla_cupy import ArgumentError, CacheFullError, PagedKVCache, ops, reference
from mla_cupy.cache.memory import HostMemory, Layout
from mla_cupy.cache.upload import Words
from tests.cache.inputs import Array, tokens
from tests.support.flat import mla_decode
from tests.support.sim_driver import simulated

SIZES: dict[str, Any] = {"num_pages": 10, "page_size": 4, "max_seqs": 4, "max_pages": 5, "device": "cpu"}


def cache(record: Any = "bf16-nope", **changes: Any) -> PagedKVCache:
    return PagedKVCache(record, **{**SIZES, **changes})


# ---- Sharing ----------------------------------------------------------------------------------------------------


def test_prefixes_are_whole_pages_and_never_everything() -> None:
    made, prompt = cache(), list(range(9))
    first, cached = made.allocate(prompt)
    assert cached == 0
    made.extend([first], 9)
    made.commit(first, prompt)
    assert made.allocate(prompt)[1] == 8
    assert made.allocate(prompt[:8])[1] == 4  # the last token has to be computed
    assert made.allocate([*prompt[:7], 99])[1] == 4
    stats = made.stats()
    assert (stats.prefix_hits, stats.prefix_lookups) == (4, 5)
    assert stats.pages_shared == 2


def test_keys_keep_prefixes_apart() -> None:
    made, prompt = cache(), list(range(9))
    first, _ = made.allocate(prompt, key=b"adapter")
    made.extend([first], 9)
    made.commit(first, prompt)
    assert made.allocate(prompt)[1] == 0
    assert made.allocate(prompt, key=b"adapter")[1] == 8


def test_cached_pages_outlive_their_sequence_until_they_are_needed() -> None:
    made, prompt = cache(), list(range(9))
    first, _ = made.allocate(prompt)
    made.extend([first], 9)
    made.commit(first, prompt)
    made.free([first])
    assert made.stats().pages_cached == 2
    assert made.allocate(prompt)[1] == 8
    others = [made.allocate()[0] for _ in range(2)]
    made.extend(others, 16)  # 2 + 8 pages: everything is in use
    assert (made.stats().pages_free, made.stats().pages_cached) == (0, 0)
    made.free(others)
    assert made.allocate(prompt)[1] == 8


def test_the_end_of_a_chain_is_given_up_first() -> None:
    made, prompt = cache(), list(range(17))
    first, _ = made.allocate(prompt)
    made.extend([first], 17)
    made.commit(first, prompt)
    made.free([first])
    other, _ = made.allocate()
    made.extend([other], 20)
    another, _ = made.allocate()
    made.extend([another], 12)  # two of the four cached pages
    assert made.stats().evictions == 2
    assert made.allocate(prompt)[1] == 8


def test_writers_of_a_shared_page_copy_it_but_for_the_last() -> None:
    made = cache()
    first, _ = made.allocate()
    made.extend([first], 5)
    second, third = made.fork(first, 2)
    assert made.stats().pages_used == 2
    assert made.extend([first, second, third], 1).copies == 2
    assert made.stats().pages_used == 4
    assert made.extend([first, second, third], 1).copies == 0


def test_a_page_that_is_written_is_no_longer_found() -> None:
    made, prompt = cache(), list(range(9))
    first, _ = made.allocate(prompt)
    made.extend([first], 9)
    made.commit(first, prompt)
    made.truncate([first], 6)
    made.extend([first], 1)
    assert made.allocate(prompt)[1] == 4


def test_an_equal_page_is_found_when_the_first_one_is_written() -> None:
    """Both sequences computed the same prompt; one of them is rewritten."""
    made, prompt = cache(), list(range(9))
    first, second = made.allocate(prompt)[0], made.allocate(prompt)[0]
    made.extend([first, second], 9)
    made.commit(first, prompt)
    made.commit(second, prompt)
    made.truncate([first], 6)
    made.extend([first], 1)
    third, cached = made.allocate(prompt)
    assert cached == 8
    assert made.pages(third)[1] == made.pages(second)[1]
    made.verify(device=True)


def test_of_equal_pages_one_is_kept() -> None:
    made, prompt = cache(), list(range(9))
    sequences = [made.allocate(prompt)[0] for _ in range(3)]
    made.extend(sequences, 9)
    for sequence in sequences:
        made.commit(sequence, prompt)
    made.free(sequences[:1])
    assert (made.stats().pages_cached, made.stats().pages_used) == (0, 6)
    made.free(sequences[1:])
    assert (made.stats().pages_cached, made.stats().pages_used) == (2, 0)
    made.verify(device=True)
    assert made.allocate(prompt)[1] == 8


WASTED: tuple[tuple[str, Any, int], ...] = (
    ("a full page, and forks that end in it", lambda c, a: c.truncate(c.fork(a), [5]), 0),
    ("one that ends before it", lambda c, a: c.truncate(c.fork(a), [4]), 0),
    ("forks of several lengths", lambda c, a: c.truncate(c.fork(a, 3), [5, 7, 6]), 0),
    ("the longest one shortened", lambda c, a: (c.truncate(c.fork(a, 2), [5, 6]), c.truncate([a], 2)), 2),
    ("a page of its own", lambda c, a: c.extend([a], 1), 3),
    ("a copy of a page", lambda c, a: (c.truncate([a], 5), c.extend(c.fork(a), 1)), 3 + 2),
    ("pages taken ahead", lambda c, a: c.reserve(a, 5), 8),
    ("pages taken ahead, and a fork", lambda c, a: (c.reserve(a, 5), c.fork(a)), 8),
    ("nothing", lambda c, a: c.free([a]), 0),
)


@pytest.mark.parametrize(("change", "wasted"), [case[1:] for case in WASTED], ids=[name for name, _, _ in WASTED])
def test_places_without_a_token(change: Any, wasted: int) -> None:
    made = cache()
    a, _ = made.allocate()
    made.extend([a], 8)
    change(made, a)
    assert made.stats().tokens_wasted == wasted


# ---- Room -------------------------------------------------------------------------------------------------------


def test_reserved_pages_are_there() -> None:
    made = cache()
    first, second = made.allocate()[0], made.allocate()[0]
    made.extend([first], 3)
    made.reserve(first, 14)  # 17 tokens, 5 pages
    assert made.stats().pages_reserved == 4
    made.extend([second], 20)
    (third,) = made.fork(second)
    made.truncate([third], 17)
    with pytest.raises(CacheFullError, match="1 more, expected at most 0 free and 0 cached"):
        made.extend([third], 1)
    made.extend([first], 14)
    assert made.stats().pages_reserved == 0
    made.truncate([first], 1)
    assert made.stats().pages_free == 4


AFTER_RESERVE: tuple[tuple[str, Any], ...] = (
    ("nothing", lambda c, a, b: None),
    ("a step of another", lambda c, a, b: c.extend([b], 1)),
    ("two steps of another", lambda c, a, b: (c.extend([b], 1), c.extend([b], 1))),
    ("a step of nobody", lambda c, a, b: c.extend([])),
    ("a step that grows by two pages", lambda c, a, b: c.extend([b], 8)),
    ("truncate", lambda c, a, b: (c.truncate([a], 2), c.extend([b], 4))),
    ("truncate after a step", lambda c, a, b: (c.extend([b], 1), c.truncate([a], 2), c.extend([b], 4))),
    ("fork", lambda c, a, b: (c.fork(a), c.extend([b], 1))),
    ("fork, and the original copies", lambda c, a, b: (c.extend([c.fork(a)[0], b], 1), c.extend([b], 1))),
    ("fork, and the fork copies", lambda c, a, b: (c.fork(a), c.extend([a, b], 1), c.extend([b], 1))),
    ("a step that finds no page", lambda c, a, b: no_room(c, b)),
    ("a step that fails", lambda c, a, b: (failed_step(c, b), c.extend([b], 1))),
    ("a step of its own that fails", lambda c, a, b: (failed_step(c, a), c.extend([b], 1))),
    ("reserve once more", lambda c, a, b: (c.extend([b], 1), c.reserve(a, 9), c.extend([b], 1))),
    ("free", lambda c, a, b: (c.free([b]), c.extend([], 1))),
)  # fmt: skip


def no_room(made: PagedKVCache, sequence: int) -> None:
    with pytest.raises(CacheFullError, match="pages"):
        made.extend([sequence, *made.fork(sequence, 1)], 16)


def failed_step(made: PagedKVCache, sequence: int) -> None:
    submit = made._memory.submit
    made._memory.submit = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        made.extend([sequence], 1)
    made._memory.submit = submit  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [change for _, change in AFTER_RESERVE], ids=[name for name, _ in AFTER_RESERVE])
def test_reserved_pages_reach_the_device(change: Any) -> None:
    """Whatever comes before the tokens that they are for."""
    made = cache()
    a, b = made.allocate()[0], made.allocate()[0]
    made.extend([a, b], [3, 4])
    made.reserve(a, 5)
    change(made, a, b)
    step = made.extend([a], 5)
    pages = made.pages(a)
    assert step.block_table[0, : len(pages)].tolist() == pages.tolist()
    place = np.arange(made.length(a) - 5, made.length(a))
    assert step.slots.tolist() == (pages[place // 4] * 4 + place % 4).tolist()
    made.verify(device=True)


def test_what_is_full() -> None:
    made = cache()
    held = [made.allocate()[0] for _ in range(4)]
    with pytest.raises(CacheFullError, match="sequences: got 1 more, expected at most 0; free sequences"):
        made.allocate()
    with pytest.raises(CacheFullError, match="sequences: got 2 more"):
        made.fork(held[0], 2)
    made.extend(held[:2], 20)
    with pytest.raises(CacheFullError, match="pages: got 1 more, expected at most 0 free and 0 cached"):
        made.extend(held[2:3], 1)
    with pytest.raises(ArgumentError, match=r"counts\[0\]: got 21 tokens in all, expected at most 20 per sequence"):
        made.extend(held[:1], 1)
    assert made.stats().tokens == 40


MISTAKES: tuple[tuple[str, Any], ...] = (
    ("sequences", lambda c, s: c.extend([s, s])),
    (r"sequences\[0\]: got \d+, expected a live sequence", lambda c, s: (c.free([s]), c.extend([s]))),
    (r"sequences\[0\]: got -1", lambda c, s: c.free([-1])),
    ("sequences", lambda c, s: c.free([1.5])),
    ("sequences", lambda c, s: c.free(s)),
    ("counts: got -1, expected 0 to max_tokens=", lambda c, s: c.extend([s], -1)),
    ("counts: got 9000 in all", lambda c, s: c.extend([s], 9000)),
    ("counts", lambda c, s: c.extend([s], [1, 2])),
    ("counts", lambda c, s: c.extend([s], 1.5)),
    (r"lengths\[0\]: got 4, expected 0 to 3", lambda c, s: c.truncate([s], 4)),
    ("tokens: got 4, expected at most 3", lambda c, s: c.commit(s, [1, 2, 3, 4])),
    ("tokens", lambda c, s: c.allocate([[1, 2]])),
    ("tokens", lambda c, s: c.reserve(s, -1)),
    ("tokens: got 100", lambda c, s: c.reserve(s, 100)),
    ("count", lambda c, s: c.fork(s, -1)),
    ("layer: got 1, expected an integer from 0 to 0", lambda c, s: c.layer(1)),
    ("pool: got 'x', expected one of kv", lambda c, s: c.layer(0, "x")),
    ("num_pages", lambda c, s: cache(num_pages=0)),
    ("max_seqs", lambda c, s: cache(max_seqs=True)),
    (r"num_pages \* page_size", lambda c, s: cache(num_pages=2**25, page_size=64)),
    ("pools", lambda c, s: cache("v5")),
    ("device", lambda c, s: cache(device="tpu")),
    ("library", lambda c, s: cache(library="tensorflow")),
    ("device", lambda c, s: cache(library="cupy")),
    ("device", lambda c, s: cache(library="numpy", device=0)),
    ("library", lambda c, s: c.set_layer(0, c.layer(0))),
)


@pytest.mark.parametrize(("message", "mistake"), MISTAKES, ids=[message[:24] for message, _ in MISTAKES])
def test_refuses(message: str, mistake: Any) -> None:
    made = cache()
    sequence, _ = made.allocate()
    made.extend([sequence], 3)
    with pytest.raises(ArgumentError, match=message):
        mistake(made, sequence)
    made.verify(device=True)


def test_an_empty_step() -> None:
    made = cache()
    step = made.extend([])
    assert (step.slots.shape, step.block_table.shape, step.seqlens.shape) == ((0,), (0, 5), (0,))


# ---- Use --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


def attend(made: PagedKVCache, step: Any, q: Array) -> Array:
    out, _ = mla_decode(q, made.layer(1), step.block_table, step.seqlens, out_dtype="float32")
    return np.asarray(out)


@pytest.mark.usefixtures("_numpy_backend")
def test_attention_over_forks_and_prefixes() -> None:
    """Two continuations of one prompt, and a sequence that begins alike, each as if it had a cache of its own."""
    made = PagedKVCache("bf16", num_layers=2, **SIZES)
    latent, rope = tokens(made.formats["kv"], 12)
    assert rope is not None
    first, _ = made.allocate(range(7))
    made.append(made.extend([first], 7), 1, latent[:7], rope[:7])
    made.commit(first, range(7))
    (second,) = made.fork(first)
    step = made.extend([second, first], [2, 1])
    made.append(step, 1, latent[7:10], rope[7:10])
    third, cached = made.allocate(range(6))
    assert cached == 4
    made.append(made.extend([third], 2), 1, latent[10:12], rope[10:12])
    step = made.extend([first, second, third], 0)
    q = np.random.default_rng(1).standard_normal((3, 1, 2, 576), np.float32).astype(latent.dtype)
    histories = ([*range(7), 9], [*range(7), 7, 8], [*range(4), 10, 11])
    got = attend(made, step, q)
    for i, history in enumerate(histories):
        rows = np.concatenate([latent, rope], axis=1)[history][None]
        alone, _ = reference.mla_decode(q[i : i + 1], rows, np.zeros((1, 1), int), np.array([len(history)]))
        np.testing.assert_allclose(got[i], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_numpy_backend")
def test_lengths_may_be_lowered_on_the_device() -> None:
    """A model that rejects drafts may lower lengths on the device: its calls see fewer tokens, and `truncate` informs
    the next step.
    """
    made = PagedKVCache("bf16", num_layers=2, **SIZES)
    latent, rope = tokens(made.formats["kv"], 9)
    sequence, _ = made.allocate()
    step = made.extend([sequence], 9)
    made.append(step, 1, latent, rope)
    q = np.random.default_rng(1).standard_normal((1, 1, 2, 576), np.float32).astype(latent.dtype)
    step.seqlens[:] -= 2  # in place: there is no other array
    lowered = attend(made, step, q)
    assert made.length(sequence) == 9
    made.truncate([sequence], 7)
    step = made.extend([sequence], 0)
    assert step.seqlens.tolist() == [7]
    np.testing.assert_array_equal(attend(made, step, q), lowered)


@pytest.mark.usefixtures("_numpy_backend")
def test_rope_takes_the_positions_of_the_step() -> None:
    made = PagedKVCache("bf16", **SIZES)
    sequence, _ = made.allocate()
    latent, rope = tokens(made.formats["kv"], 6)
    angles = np.random.default_rng(0).random((30, 32), np.float32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    made.append(made.extend([sequence], 4), 0, latent[:4], rope[:4], **tables)  # type: ignore[index]
    step = made.extend([sequence], 2)
    made.append(step, 0, latent[4:], rope[4:], **tables)  # type: ignore[index]
    rows = mla_cupy.cache_gather(made.layer(0), step.slots, out_dtype="float32")
    turned = reference.cache.rotate(rope[4:], tables["cos"], tables["sin"], [4, 5])  # type: ignore[index]
    np.testing.assert_array_equal(rows[:, 512:], turned.astype(latent.dtype).astype(np.float32))


def test_pools_of_records_and_of_index_keys() -> None:
    made = cache({"kv": "v32", "indexer": "indexer"}, num_layers=3, page_size=64)
    assert made.layer(2).shape == (10, 64, 656)
    assert made.layer(2).strides == (41984, 656, 1)
    assert made.layer(0, "indexer").shape == (10, 64, 132)
    assert made.layer(0, "indexer").strides[0] == 8448
    assert not np.shares_memory(made.layer(0), made.layer(1))


def test_pools_of_tokens_without_rope() -> None:
    """Their width is that of another record: the pool names it."""
    made = cache("v32-nope", page_size=4)
    sequence, _ = made.allocate([])
    step = made.extend([sequence], 6)
    latent, _ = tokens(made.formats["kv"], 6, "float32")
    made.append(step, 0, latent)
    rows = mla_cupy.cache_gather(made.layer(0), step.slots, kv_format="v32-nope", out_dtype="float32")
    (exact,) = reference.cache_gather(made.layer(0), step.slots, kv_format="v32-nope")
    np.testing.assert_array_equal(rows, exact)
    np.testing.assert_allclose(exact, latent, rtol=2**-4, atol=np.abs(latent).max() * 2**-9)


class OperationsMemory(HostMemory):
    """Changed by the operations, so that the kernels of the simulator run."""

    def __init__(self, layout: Layout, run: ModuleType = ops) -> None:
        super().__init__(layout, run)


def test_on_the_kernels_in_the_simulator() -> None:
    from tests.cache.model import Pair

    with simulated(2) as target:
        pair = Pair(max_seqs=3, memory=OperationsMemory)
        first = pair.allocate([])
        pair.extend({first: pair.new_ids(5)})
        (second,) = pair.fork(first, 1)
        pair.extend({second: pair.new_ids(2), first: pair.new_ids(1)})
        pair.truncate(second, 2)
        pair.extend({second: pair.new_ids(4)})
        pair.free(first)
        pair.extend({second: pair.new_ids(1)})
        pair.check()
        assert "mla_cache_update" in target.launched
        assert "mla_cache_copy_pages" in target.launched


def test_threads() -> None:
    """Each changes its own sequences; all share pages of one prompt."""
    made = cache(num_pages=64, max_seqs=16, max_pages=8)
    root, _ = made.allocate()
    made.extend([root], 6)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng, mine = random.Random(seed), made.fork(root, 2)
        try:
            for _ in range(150):
                operation = rng.randrange(4)
                if operation == 0:
                    made.truncate([mine[0]], rng.randint(0, made.length(mine[0])))
                elif operation == 1:
                    made.free([mine.pop()])
                    mine += made.fork(root)
                else:
                    made.extend(mine, [min(1, 32 - made.length(s)) for s in mine])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    made.verify(device=True)
    assert made.length(root) == 6


# ---- Host time --------------------------------------------------------------------------------------------------


class NoWork(HostMemory):
    """The host's share of a step alone."""

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        pass


@pytest.mark.parametrize("end", ["truncate", "free"])
def test_what_was_the_longest_sequence_limits_no_other(end: str) -> None:
    made = PagedKVCache("bf16", num_pages=8, page_size=4, max_seqs=2, max_pages=4, device="cpu")
    first, other = made.allocate()[0], made.allocate()[0]
    made.extend([first], 16)
    made.truncate([first], 3) if end == "truncate" else made.free([first])
    for _ in range(16):
        made.extend([other], 1)
        made.verify()
    made.extend([other], 0)
    for counts in (1, [1]):
        with pytest.raises(ArgumentError, match=r"counts\[0\]: got 17 tokens in all, expected at most 16 per sequence"):
            made.extend([other], counts)
    made.verify()


@pytest.mark.perf
@pytest.mark.parametrize(("growing", "limit_us"), [(4, 50), (256, 100)])
def test_host_time_of_a_step_of_256(growing: int, limit_us: float) -> None:
    """Bookkeeping and packing, without the upload and the launch: the fastest of many steps, on an idle machine."""
    made = cache("v32", num_pages=24000, page_size=64, max_seqs=256, max_pages=256, memory=NoWork, max_tokens=1 << 15)
    held = [made.allocate()[0] for _ in range(256)]
    times = []
    for _ in range(200):
        made.truncate(held, 0)
        made.extend(held, np.arange(256) // 4 + 1 if growing == 4 else 64)
        begin = time.perf_counter()
        made.extend(held, 1)
        times.append(1e6 * (time.perf_counter() - begin))
    assert min(times) <= limit_us


def test_the_parts_of_an_upload_follow_each_other() -> None:
    at = Words.of(max_seqs=5, max_pages=3)
    words = np.arange(at.total, dtype=np.int32)
    sheet = at.sheet(words)
    assert at.header % 4 == 0
    assert len(words[at.changes :]) == 2 * 5 * 3
    lists = sheet.header, sheet.rows, sheet.lengths, sheet.first_changes, sheet.first_tokens
    assert [len(x) for x in lists] == [8, 5, 5, 6, 6]
    for part, number in zip(lists, range(1, 6), strict=True):
        part[:] = number
    assert words[at.header : at.changes].tolist() == [1] * 8 + [2] * 5 + [3] * 5 + [4] * 6 + [5] * 6
