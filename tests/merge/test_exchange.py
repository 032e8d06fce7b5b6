"""The kernel that exchanges and merges the partial results of context-parallel ranks, all on one (simulated) GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from ptxsim.errors import KernelTrap

from mla_cupy.kernels.lse import LseOptions
from mla_cupy.kernels.merge.exchange import MAX_BLOCKS, Exchange
from mla_cupy.runtime import loader
from tests.merge.exchanges import Ranks
from tests.support.mutant_suite import mutant_suite
from tests.support.mutants import Mutant
from tests.support.sim_driver import SimDriver, fake_gpu, simulated

CASES = (
    Ranks(Exchange(2, 1, 1, 4, 512, "float32", "e", 3), "bfloat16"),
    Ranks(Exchange(2, 3, 2, 3, 64, "bfloat16", "2", 10), "bfloat16", LseOptions("e", 0.0)),
    Ranks(Exchange(3, 1, 2, 5, 128, "float16", "e", 4), "float32", LseOptions("2", float("inf"))),
    Ranks(Exchange(5, 2, 1, 1, 8, "float32", "2"), "float32"),
    Ranks(Exchange(2, 1, 1, 2, 520, "float16", "e", 3), "float32"),  # a wide slice and a short one
    Ranks(Exchange(2, 1, 1, 1, 512, "float32", "e", 4), "float32", num_splits=20),  # narrow slices
    Ranks(Exchange(2, 5, 1, 1, 512, "float32", "2", 4), "float16", num_splits=60),  # wide ones, in turn
    Ranks(Exchange(3, 2, 2, 2, 512, "float16", "e", 2), "float32", num_splits=5),
)


@contextmanager
def machine(ranks: Ranks, mode: str = "early", seed: int = 0) -> Iterator[SimDriver]:
    """One GPU for all ranks."""
    with simulated(mode=mode, seed=seed) as target:
        target.resident, target.race_global = ranks.call.blocks * ranks.call.world, True
        ranks.mailboxes["slabs"] = [target.memory.map(x) for x in ranks.slabs]
        ranks.mailboxes["flags"] = [target.memory.map(x) for x in ranks.flags]
        yield target


def run(target: SimDriver, ranks: Ranks, rank: int = 0, count: int | None = None) -> None:
    addresses = [0, *(target.memory.map(x) if x.size else 0 for x in ranks.arrays)]
    if not ranks.num_splits:
        addresses[5] = 0  # no schedule
    ranks.prepared(fake_gpu(2), 0, rank, count).enqueue(addresses, 0, 0)


def run_calls(ranks: Ranks, mode: str, seed: int) -> None:
    """Three in a row: both halves of the slabs, and the first once more."""
    ranks.__post_init__()
    with machine(ranks, mode, seed) as target:
        for call in range(3):
            ranks.fill(call)
            run(target, ranks)
            ranks.check()


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("mode", "seed"), [("early", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize(
    "ranks", CASES, ids=lambda ranks: f"world{ranks.call.world}-d{ranks.call.d}-splits{ranks.num_splits}"
)
def test_calls_in_a_row(ranks: Ranks, mode: str, seed: int) -> None:
    run_calls(ranks, mode, seed)
    assert ranks.states["epoch"].tolist() == [3] * ranks.call.world
    assert not ranks.states["tickets"].any()
    assert not ranks.reports.view(np.uint8).any()


# ---- What goes wrong -------------------------------------------------------------------------------------------

TIMEOUT, MISMATCH, ABORTED = 1, 2, 3


def alone() -> Ranks:
    """Rank 1 of 3, whose peers never come; 40 rows of heads, so that several blocks wait."""
    ranks = Ranks(Exchange(3, 1, 2, 5, 64, "float32", "e"), timeout_ns=2000)  # steps, in the simulator
    ranks.fill(0)
    return ranks


def failure(ranks: Ranks) -> tuple[int, int, int]:
    """The report of the rank that ran: what failed, the peer that it waited for, and in which call."""
    word = int(ranks.reports["failure"][0])
    return word & 0xFF, word >> 8 & 0xFF, word >> 32


def assert_stopped(ranks: Ranks) -> None:
    assert np.isnan(ranks.out[0]).all()
    assert np.isnan(ranks.lse[0]).all()
    assert ranks.states["failed"].tolist() == [1, 0, 0]
    assert ranks.states["tickets"][0] == 0


def test_a_wait_ends_by_time_and_the_rank_stops_for_good() -> None:
    ranks = alone()
    with machine(ranks) as target:
        run(target, ranks, rank=1, count=1)
        assert_stopped(ranks)
        what, peer, epoch = failure(ranks)
        assert (what, epoch) == (TIMEOUT, 1)
        assert peer in (0, 2)
        sent = ranks.slabs.copy(), ranks.flags.copy()
        ranks.timeout_ns = 1 << 60  # it would hang
        ranks.fill(1)
        run(target, ranks, rank=1, count=1)
    assert_stopped(ranks)
    assert ranks.states["epoch"][0] == 2
    np.testing.assert_array_equal(sent[0], ranks.slabs, "a rank that has failed pushes nothing")
    np.testing.assert_array_equal(sent[1], ranks.flags)


@pytest.fixture
def debug_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLA_CUPY_DEBUG", "1")
    loader.forget()
    yield
    loader.forget()


@pytest.mark.usefixtures("debug_builds")
def test_debug_builds_trap_where_a_wait_ends_by_time() -> None:
    """And there alone; the host's report is written first."""
    ranks = alone()
    with machine(ranks) as target, pytest.raises(KernelTrap):
        run(target, ranks, rank=1, count=1)
    assert failure(ranks)[0] == TIMEOUT
    assert failure(ranks)[2] == 1
    ranks = alone()
    ranks.reports["abort"][0] = 1
    with machine(ranks) as target:
        run(target, ranks, rank=1, count=1)
    assert_stopped(ranks)
    assert failure(ranks)[0] == ABORTED


def test_calls_that_differ_are_noticed_at_once() -> None:
    ranks = alone()
    ranks.timeout_ns = 1 << 60
    other = Exchange(3, 1, 2, 5, 64, "float32", "2")
    assert other.digest != ranks.call.digest
    by_call_and_source = ranks.flags.reshape(3, 2, 3, MAX_BLOCKS)
    by_call_and_source[1, 1, 0] = ranks.call.digest << 32 | 1
    by_call_and_source[1, 1, 2] = other.digest << 32 | 1
    with machine(ranks) as target:
        run(target, ranks, rank=1, count=1)
    assert_stopped(ranks)
    assert failure(ranks) == (MISMATCH, 2, 1)


def test_the_host_ends_a_wait() -> None:
    ranks = alone()
    ranks.timeout_ns = 1 << 60
    ranks.reports["abort"][0] = 1
    with machine(ranks) as target:
        run(target, ranks, rank=1, count=1)
    assert_stopped(ranks)
    assert failure(ranks)[0] == ABORTED


def test_what_is_pushed_goes_nowhere_else() -> None:
    ranks = alone()
    with machine(ranks) as target:
        run(target, ranks, rank=1, count=1)
    slabs = ranks.slabs.reshape(3, 2, 3, ranks.slab)  # owner, half, source
    for owner in range(3):
        written = (slabs[owner] != 0xFF).any(axis=-1)
        assert written.tolist() == [[False] * 3, [False, owner != 1, False]]
    flags = ranks.flags.reshape(3, 2, 3, MAX_BLOCKS)
    expected = np.zeros_like(flags)
    expected[[0, 2], 1, 1, : ranks.call.blocks] = ranks.call.digest << 32 | 1
    np.testing.assert_array_equal(flags, expected)


# ---- Mutants ---------------------------------------------------------------------------------------------------

WHOLE = Ranks(Exchange(3, 1, 2, 6, 64, "float32", "e", 4), timeout_ns=20000)
SPLIT = Ranks(Exchange(2, 2, 2, 1, 512, "float32", "e", 4), timeout_ns=40000, num_splits=44)

test_is_caught, test_as_it_is = mutant_suite(
    "merge_exchange",
    [
        partial(run_calls, WHOLE, "early", 0),
        partial(run_calls, WHOLE, "random", 1),
        partial(run_calls, SPLIT, "early", 0),
        partial(run_calls, SPLIT, "random", 1),
    ],
    {
        "bar.sync": (4, [0, 2]),
    },
    [Mutant("heads of a KV head are one row", "merge/local_slices.cuh", "at.head % group", "kv_head")],
)
