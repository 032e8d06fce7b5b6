"""The NCCL transport over a stand-in for NCCL: ranks join, compare their calls and exchange."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
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
    """Unique id as bytes (CuPy 14) or signed numbers (earlier); the communicator accepts the same type."""
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
    group = LocalGroup(1)
    transport = NcclTransport(group.member(0))
    assert transport.world == 1
    alive = weakref.ref(transport)
    del transport
    assert alive() is None, "the group keeps it"


def test_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "cupy_family", lambda: SimpleNamespace(nccl=lambda: None))
    old = SimpleNamespace(get_version=lambda: "0.1")
    without_library = SimpleNamespace(get_version=lambda: SimpleNamespace(libnccl=None))
    for module in (None, SimpleNamespace(core=old), SimpleNamespace(core=without_library)):
        monkeypatch.setitem(sys.modules, "nccl", module)
        monkeypatch.setitem(sys.modules, "nccl.bindings", SimpleNamespace(nccl=None))
        with pytest.raises(ParallelError, match=r"NCCL: got none, expected cupy\.cuda\.nccl or nccl4py; install"):
            NcclTransport(LocalGroup(1).member(0))


class StandIn:
    """The parts of `cupy.cuda.nccl` or nccl4py that the transport uses, for threads over the simulator's memory."""

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
        self.nccl4py = SimpleNamespace(
            get_version=lambda: SimpleNamespace(libnccl="2.32.3"),
            get_unique_id=lambda: _UniqueId.from_bytes(UNIQUE),
            UniqueId=_UniqueId,
            Communicator=SimpleNamespace(init=self.nccl4py_communicator),
        )
        self.nccl4py_bindings = SimpleNamespace(
            DataType=SimpleNamespace(Uint8=1),
            Comm=lambda handle: _Comm(self.joined[handle]),
            send=lambda address, nbytes, kind, other, comm, stream: comm.own.send(address, nbytes, kind, other, stream),
            recv=lambda address, nbytes, kind, other, comm, stream: comm.own.recv(address, nbytes, kind, other, stream),
            group_start=self.group_start,
            group_end=self.group_end,
        )
        self.joined: dict[int, Any] = {}

    def nccl4py_communicator(self, nranks: int, rank: int, unique_id: _UniqueId) -> Any:
        """Stand-in with the signatures of nccl4py 0.6."""
        assert isinstance(unique_id, _UniqueId)
        self.joined[rank + 1] = own = self.communicator(nranks, bytes(unique_id), rank)
        return SimpleNamespace(ptr=rank + 1, abort=own.abort)

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


class _UniqueId:
    """Communicator of nccl4py."""

    def __init__(self, own: bytes) -> None:
        self._own = own

    @classmethod
    def from_bytes(cls, own: bytes) -> _UniqueId:
        return cls(own)

    def __bytes__(self) -> bytes:
        return self._own


class _Comm:
    """Handle of nccl4py's bindings, which refuse a bare number."""

    def __init__(self, own: Any) -> None:
        self.own = own


@pytest.fixture(params=["CuPy's NCCL", "nccl4py"])
def stand_in(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[StandIn]:
    lock = threading.Lock()

    def one_at_a_time(*arguments: Any, **options: Any) -> Any:
        with lock:  # the simulator is one for all threads
            return merge_states(*arguments, **options)

    with simulated() as target:
        made = StandIn(target.memory)
        family: Any = arrays.cupy_family()
        family.on_device = lambda device: contextlib.nullcontext()
        by_cupy = request.param != "nccl4py"
        family.nccl = lambda: made.module if by_cupy else None
        if not by_cupy:
            monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=made.nccl4py))
            monkeypatch.setitem(sys.modules, "nccl.bindings", SimpleNamespace(nccl=made.nccl4py_bindings))
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


def test_no_rows(stand_in: StandIn) -> None:
    def merge(context: ContextParallel) -> Any:
        return context.merge(np.zeros((0, 3, 6, 64), np.float32), np.zeros((0, 6, 3), np.float32))

    assert [rank.result()[0].shape for rank in on_all_ranks(LocalGroup(WORLD), merge)] == [(0, 3, 3, 64)] * WORLD


def test_calls_that_differ_are_told_on_every_rank(stand_in: StandIn) -> None:
    """Raised before NCCL waits for more bytes than the other rank sends; later calls work."""

    def merge(context: ContextParallel) -> str:
        with pytest.raises(ParallelError, match=r"rank [01] merges \[\[2, 3, 6, (64|128)\]") as error:
            context.merge(*partials(context.rank, d=64 << context.rank))
        context.merge(*partials(context.rank))
        return str(error.value)

    assert all("merges" in rank.result() for rank in on_all_ranks(LocalGroup(WORLD), merge))
    assert stand_in.exchanges == WORLD


def test_a_call_that_another_rank_does_not_make(stand_in: StandIn) -> None:
    """NCCL's communicator is aborted, and every later call fails."""

    contexts = []  # a rank that has dropped its own has nothing to abort

    def merge(context: ContextParallel) -> None:
        contexts.append(context)
        context.merge(*partials(context.rank))
        if context.rank == 0:
            context.merge(*partials(context.rank, d=128))

    first, second = on_all_ranks(LocalGroup(WORLD, timeout=1), merge)
    second.result()
    with pytest.raises(ParallelError, match="no word from all members"):
        first.result()
    assert stand_in.aborted == {0, 1}
