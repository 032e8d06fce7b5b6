"""The transport through NCCL without NCCL: how ranks join, compare their calls and exchange, over a stand-in."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mla_cupy import ParallelError, arrays, reference
from mla_cupy.ops.merge import merge_states
from mla_cupy.parallel import ContextParallel, LocalGroup, NcclTransport, nccl
from tests.parallel.shards import heads_of
from tests.support.sim_driver import simulated

UNIQUE = bytes(range(100, 228))
WORLD = 2


@pytest.mark.parametrize("kind", [bytes, tuple], ids=["cupy 14", "cupy 13"])
def test_the_identifier_in_the_form_of_this_cupy(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes since CuPy 14, signed numbers before; `get_unique_id` gives what the communicator takes."""
    own = UNIQUE if kind is bytes else tuple(x - 256 if x > 127 else x for x in UNIQUE)

    def communicator(world: int, unique: Any, rank: int) -> Any:
        if not isinstance(unique, kind):
            raise TypeError(f"expected {kind.__name__}")
        assert (world, unique, rank) == (1, own, 0)
        return SimpleNamespace(abort=None)

    nccl = SimpleNamespace(get_unique_id=lambda: own, NcclCommunicator=communicator)
    cupy = SimpleNamespace(
        nccl=lambda: nccl, current_device=lambda: 0, on_device=lambda device: contextlib.nullcontext()
    )
    monkeypatch.setattr(arrays, "cupy_family", lambda: cupy)
    assert NcclTransport(LocalGroup(1).member(0)).world == 1


class StandIn:
    """What of `cupy.cuda.nccl` the transport uses, between threads over the simulator's memory."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.exchanges, self.aborted = memory, 0, set[int]()
        self.wires: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.pending = threading.local()
        self.module = SimpleNamespace(
            NCCL_UINT8=1,
            get_unique_id=lambda: UNIQUE,
            NcclCommunicator=self.communicator,
            groupStart=self.group_start,
            groupEnd=self.group_end,
        )

    def communicator(self, world: int, unique: bytes, rank: int) -> Any:
        def send(address: int, nbytes: int, kind: int, other: int, stream: int) -> None:
            self.wires[rank, other].put(self.memory.slice(address, nbytes).copy())

        def recv(address: int, nbytes: int, kind: int, other: int, stream: int) -> None:
            self.pending.of.append((address, nbytes, (other, rank)))

        assert (world, unique) == (WORLD, UNIQUE)
        return SimpleNamespace(send=send, recv=recv, abort=lambda: self.aborted.add(rank))

    def group_start(self) -> None:
        self.pending.of = []

    def group_end(self) -> None:
        for address, nbytes, wire in self.pending.of:
            self.memory.slice(address, nbytes, write=True)[:] = self.wires[wire].get(timeout=20)
        self.exchanges += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    lock = threading.Lock()

    def one_at_a_time(*arguments: Any, **options: Any) -> Any:
        with lock:  # the simulator is one for all threads
            return merge_states(*arguments, **options)

    with simulated() as target:
        made = StandIn(target.memory)
        family: Any = arrays.cupy_family()
        family.nccl, family.on_device = lambda: made.module, lambda device: contextlib.nullcontext()
        monkeypatch.setattr(nccl, "merge_states", one_at_a_time)
        yield made


def on_all_ranks(group: LocalGroup, task: Callable[[ContextParallel], Any]) -> list[Future[Any]]:
    def run(rank: int) -> Any:
        return task(ContextParallel(NcclTransport(group.member(rank), device=0)))

    with ThreadPoolExecutor(WORLD) as threads:
        return [threads.submit(run, rank) for rank in range(WORLD)]


def partials(rank: int, h_q: int = 6, d: int = 64) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    outs = rng.standard_normal((2, 3, h_q, d)).astype(np.float32)
    return outs, rng.standard_normal((2, h_q, 3)).astype(np.float32)


def test_heads_reach_their_ranks(stand_in: StandIn) -> None:
    def merge(context: ContextParallel) -> list[Any]:
        return [context.merge(*partials(context.rank)) for _ in range(3)]

    outs, lses = zip(*map(partials, range(WORLD)), strict=True)
    expected = reference.merge_states(np.stack(outs), np.stack(lses))
    for rank, calls in enumerate(on_all_ranks(LocalGroup(WORLD), merge)):
        for out, lse in calls.result():
            np.testing.assert_allclose(out, heads_of(expected[0], 2, WORLD, rank), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse, heads_of(expected[1], 1, WORLD, rank), rtol=1e-5, atol=1e-6)


def test_calls_that_differ_are_told_on_every_rank(stand_in: StandIn) -> None:
    """Before NCCL is asked for bytes of which the other rank sends fewer; the next calls go on."""

    def merge(context: ContextParallel) -> str:
        with pytest.raises(ParallelError, match=r"rank [01] merges \[\[2, 3, 6, (64|128)\]") as error:
            context.merge(*partials(context.rank, d=64 << context.rank))
        context.merge(*partials(context.rank))
        return str(error.value)

    assert all("merges" in rank.result() for rank in on_all_ranks(LocalGroup(WORLD), merge))
    assert stand_in.exchanges == WORLD


def test_a_call_that_another_rank_does_not_make(stand_in: StandIn) -> None:
    """What NCCL has begun is aborted, and every later call fails."""

    def merge(context: ContextParallel) -> None:
        context.merge(*partials(context.rank))
        if context.rank == 0:
            context.merge(*partials(context.rank, d=128))

    first, second = on_all_ranks(LocalGroup(WORLD, timeout=1), merge)
    second.result()
    with pytest.raises(ParallelError, match="no word from all members"):
        first.result()
    assert stand_in.aborted == {0, 1}
