"""Processes that meet over TCP; each is a thread here, with real connections."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mla_cupy import ArgumentError, ParallelError
from mla_cupy.parallel import ContextParallel, HostTransport, LocalGroup, Rendezvous, rendezvous

HOST = "127.0.0.1"


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return HOST, probe.getsockname()[1]


def together(*tasks: Callable[[], Any]) -> list[Future[Any]]:
    """Run all tasks at once, and wait for them."""
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [threads.submit(task) for task in tasks]


def results(*tasks: Callable[[], Any]) -> list[Any]:
    return [future.result() for future in together(*tasks)]


def meet(world: int, address: tuple[str, int], timeout: float = 30.0) -> list[Rendezvous]:
    return [
        f.result()
        for f in together(*(lambda r=r: Rendezvous(world, r, address, timeout=timeout) for r in range(world)))
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_gather(world: int, address: tuple[str, int]) -> None:
    members = meet(world, address)
    for turn in range(3):
        payloads = [bytes([turn, rank]) * rank * 100_000 for rank in range(world)]
        assert results(*(partial(m.gather, payloads[m.rank]) for m in members)) == [payloads] * world
    for member in members:
        member.check()
        member.close()
        member.close()


def test_those_who_differ_are_told(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    results = together(lambda: Rendezvous(3, 0, address, timeout=20), lambda: Rendezvous(2, 1, address, timeout=20))
    for result in results:
        with pytest.raises(ParallelError, match="version and world"):
            result.result()


def test_two_of_one_rank(address: tuple[str, int]) -> None:
    failed = []
    for met in together(*(partial(Rendezvous, 3, rank, address, timeout=20) for rank in (0, 1, 1))):
        with pytest.raises(ParallelError, match="two processes of rank 1"), met.result() as member:
            member.gather(b"")  # the first of the two learns of it when it has met
        failed.append(met)
    assert len(failed) == 3


def test_nobody_comes(address: tuple[str, int]) -> None:
    start = time.monotonic()
    with pytest.raises(ParallelError, match=r"no word from ranks \[1\]"):
        Rendezvous(2, 0, address, timeout=0.2)
    with pytest.raises(ParallelError, match="no answer"):
        Rendezvous(2, 1, address, timeout=0.2)
    assert time.monotonic() - start < 20


def test_strangers_are_ignored(address: tuple[str, int]) -> None:
    def stranger() -> Rendezvous:
        while True:
            try:
                with socket.create_connection(address, timeout=5) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    break
            except ConnectionRefusedError:
                time.sleep(0.01)
        return Rendezvous(2, 1, address, timeout=20)

    first, second = results(partial(Rendezvous, 2, 0, address, timeout=20), stranger)
    assert results(partial(first.gather, b"a"), partial(second.gather, b"b")) == [[b"a", b"b"]] * 2
    first.close()
    second.close()


def test_a_process_that_ends_is_noticed_by_all_at_once(address: tuple[str, int]) -> None:
    members = meet(3, address)
    noticed = [threading.Event() for _ in members]
    for member, event in zip(members, noticed, strict=True):
        member.on_loss(event.set)
    link = members[2]._links[0]
    link._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link._connection.shutdown(socket.SHUT_RDWR)
    assert noticed[0].wait(20)
    assert noticed[1].wait(20)
    for member in members[:2]:
        with pytest.raises(ParallelError, match="rank 2 has ended"):
            member.check()
        with pytest.raises(ParallelError, match="rank 2 has ended"):
            member.gather(b"")
    late = threading.Event()
    members[0].on_loss(late.set)
    assert late.is_set()
    for member in members:
        member.close()


def test_a_silent_process_counts_as_gone(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 1000.0)
    members = meet(2, address)
    lost = threading.Event()
    members[0].on_loss(lost.set)
    assert lost.wait(20)
    with pytest.raises(ParallelError, match="has said nothing for"):
        members[0].check()
    for member in members:
        member.close()


def test_who_leaves_is_missed_when_needed(address: tuple[str, int]) -> None:
    first, second = meet(2, address)
    second.close()
    with pytest.raises(ParallelError, match="rank 1 has left"):
        first.gather(b"")
    first.close()


def test_a_call_that_another_never_makes(address: tuple[str, int]) -> None:
    first, second = meet(2, address, timeout=0.5)
    with pytest.raises(ParallelError, match=r"rank 1 has not made this call for 0.5 s"):
        first.gather(b"")
    with pytest.raises(ParallelError):
        second.gather(b"")
    first.close()
    second.close()


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1), (2.0, 0), (True, 0), (2, None)])
def test_ranks_are_checked(world: Any, rank: Any, address: tuple[str, int]) -> None:
    with pytest.raises(ArgumentError, match=r"world|rank"):
        Rendezvous(world, rank, address)


def test_the_environment(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ArgumentError, match="no RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        Rendezvous.from_environment()
    values = {"RANK": "0", "WORLD_SIZE": "one", "MASTER_ADDR": HOST, "MASTER_PORT": str(address[1])}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=r"WORLD_SIZE.*'one'.*an integer"):
        Rendezvous.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Rendezvous.from_environment() as member:
        assert member.gather(b"x") == [b"x"]


def test_threads() -> None:
    group = LocalGroup(3)
    for turn in range(5):
        payloads = [bytes([turn, rank]) for rank in range(3)]
        assert results(*(partial(group.member(rank).gather, payloads[rank]) for rank in range(3))) == [payloads] * 3


def test_a_thread_that_never_comes() -> None:
    group = LocalGroup(2, timeout=0.2)
    with pytest.raises(ParallelError, match="no word from all members"):
        group.member(0).gather(b"")
    with pytest.raises(ParallelError):
        group.member(1).check()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: LocalGroup(2**31), r"world: got 2147483648, expected an integer from 1 to"),
        (lambda: LocalGroup(2, timeout="x"), "timeout: got 'x', expected seconds"),
        (lambda: LocalGroup(2, timeout=float("nan")), "timeout: got nan"),
        (lambda: Rendezvous(1, 0, ("127.0.0.1", 9), timeout=None), "timeout: got None"),
        (lambda: Rendezvous(2, 0, "localhost", timeout=0.1), "address: got 'localhost', expected a host and a port"),
        (lambda: Rendezvous(2, 1, ("localhost", 2**31), timeout=0.1), r"address\[1\]: got 2147483648"),
        (lambda: HostTransport(None), "group: got None, expected a Rendezvous"),
        (lambda: ContextParallel("nccl"), "transport: got 'nccl', expected a PeerTransport"),
    ],
)
def test_bad_arguments(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        call()


def test_an_address_that_is_taken(address: tuple[str, int]) -> None:
    with socket.create_server(address), pytest.raises(ParallelError, match=f"no way to listen at .*:{address[1]}"):
        Rendezvous(2, 0, address, timeout=0.2)
