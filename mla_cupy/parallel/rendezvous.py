"""Rendezvous of a group's processes: rank 0 listens, the other ranks connect, and all notice when a process is gone.

It carries small, rare messages such as memory handles; transports carry tensors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from mla_cupy._version import __version__
from mla_cupy.errors import ArgumentError, ParallelError, explain
from mla_cupy.ops.checks import check_count
from mla_cupy.parallel.group import DEFAULT_TIMEOUT, check_timeout, check_world

BEAT_SECONDS = 1.0
"""Heartbeat interval of an idle process, in seconds."""
SILENCE_SECONDS = 5.0
"""Seconds of silence after which a process counts as gone; a process that ends is noticed at once."""

_HEADER = struct.Struct("<4sBIQ")  # magic, kind, rank, length of the payload
_MAGIC = b"MLAr"
_HELLO, _GATHER, _BEAT, _LOST, _LEAVE = range(5)
_MAX_BYTES = 1 << 32
_MAX_PORT = 65535


def _check_address(address: Any) -> None:
    """Raise ArgumentError unless it is a host and a port."""
    if isinstance(address, (tuple, list)) and len(address) == 2 and isinstance(address[0], str):
        check_count("address[1]", address[1], 0, _MAX_PORT)
        return
    raise ArgumentError(explain("address", repr(address), "a host and a port, such as ('127.0.0.1', 29500)"))


class Rendezvous:
    """One process of a group; see `Group` for `gather`, `check` and `on_loss`.

    Parameters
    ----------
    world, rank : int
    address : (str, int)
        Host and port where rank 0 listens.
    timeout : float
        Seconds that a process waits for the others.

    Raises
    ------
    ArgumentError
        If `rank`, the address or the timeout is not valid.
    ParallelError
        If rank 0 cannot listen at the address, or the others do not come within the time, or differ in `world` or in
        the version of the package.
    """

    def __init__(self, world: int, rank: int, address: tuple[str, int], *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.world, self.rank = world, rank = check_world(world, rank)
        self._timeout = timeout = check_timeout(timeout)
        _check_address(address)
        self._lost = ""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._inbox: dict[int, queue.Queue[bytes | None]] = {}
        self._links: dict[int, _Link] = {}
        self._closed = threading.Event()
        deadline = time.monotonic() + timeout
        if world > 1:
            self._links = self._accept(address, deadline) if rank == 0 else {0: self._connect(address, deadline)}
        for other, link in self._links.items():
            self._inbox[other] = queue.Queue()
            threading.Thread(target=self._listen, args=(other, link), daemon=True).start()
        if world > 1:
            threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def from_environment(cls, *, timeout: float = DEFAULT_TIMEOUT) -> Rendezvous:
        """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, as launchers set them.

        Raises
        ------
        ArgumentError
            If one of them is missing or is no number.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            remedy = "start the processes with `python -m mla_cupy.parallel`, or set the variables"
            raise ArgumentError(explain("environment", f"no {', '.join(missing)}", ", ".join(names), remedy))
        rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(world, rank, (os.environ["MASTER_ADDR"], port), timeout=timeout)

    def gather(self, payload: bytes) -> list[bytes]:
        """Gather every process's object, in the order of the ranks; see `Group.gather`."""
        if self.world == 1:
            return [payload]
        if self.rank == 0:
            parts = [payload, *(self._receive(other) for other in range(1, self.world))]
            joined = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
            for other in range(1, self.world):
                self._send(other, _GATHER, joined)
            return parts
        self._send(0, _GATHER, payload)
        return _parted(self._receive(0))

    def check(self) -> None:
        """Raise ParallelError if a process is gone."""
        if self._lost:
            raise ParallelError(explain("the group", self._lost, f"all {self.world} ranks", "start all of them anew"))

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Register a callback to be called, from another thread, as soon as a process is gone."""
        with self._lock:
            self._callbacks.append(callback)
            lost = bool(self._lost)
        if lost:
            callback()

    def close(self) -> None:
        """Leave the group; the others go on until they need this process."""
        if self._closed.is_set():
            return
        self._closed.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(_LEAVE, self.rank, b"")
            link.close()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- Meeting -------------------------------------------------------------------------------------------------

    @property
    def _hello(self) -> bytes:
        return f"{__version__} {self.world}".encode()

    def _accept(self, address: tuple[str, int], deadline: float) -> dict[int, _Link]:
        links: dict[int, _Link] = {}
        with self._listening(address) as server:
            while len(links) < self.world - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.world)) - set(links))
                    raise self._absent(f"no word from ranks {missing}", links) from None
                link = _Link(connection)
                try:
                    kind, other, theirs = link.receive(2.0)
                except (OSError, _BadMessageError):  # a stranger, such as a port scanner
                    link.close()
                    continue
                problem = self._misfit(kind, other, theirs, links)
                link.send(_HELLO, 0, problem.encode())
                if problem:
                    link.close()
                    raise self._absent(problem, links)
                links[other] = link
        return links

    def _listening(self, address: tuple[str, int]) -> socket.socket:
        try:
            return socket.create_server(address, backlog=self.world)
        except OSError as error:
            raise self._absent(f"no way to listen at {address[0]}:{address[1]} ({error})", {}) from None

    def _misfit(self, kind: int, other: int, theirs: bytes, links: dict[int, _Link]) -> str:
        if kind != _HELLO or theirs != self._hello:
            told = theirs.decode(errors="replace")
            return f"rank {other} with version and world {told!r}, unlike {self._hello.decode()!r} of rank 0"
        if other in links or not 0 < other < self.world:
            return f"two processes of rank {other}"
        return ""

    def _absent(self, what: str, links: dict[int, _Link]) -> ParallelError:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send(_LOST, 0, what.encode())
            link.close()
        remedy = "start all ranks, with the same version of mla_cupy"
        return ParallelError(explain("the rendezvous", what, f"all {self.world} ranks in time", remedy))

    def _connect(self, address: tuple[str, int], deadline: float) -> _Link:
        while True:
            try:
                link = self._greet(address, deadline)
            except (OSError, _BadMessageError) as error:
                if time.monotonic() > deadline:
                    raise self._absent(f"no answer at {address[0]}:{address[1]} ({error})", {}) from None
                time.sleep(0.05)  # rank 0 may not listen yet
            else:
                return link

    def _greet(self, address: tuple[str, int], deadline: float) -> _Link:
        """Connect to rank 0, and wait until it accepts this rank."""
        link = _Link(socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic())))
        try:
            link.send(_HELLO, self.rank, self._hello)
            _, _, problem = link.receive(max(0.01, deadline - time.monotonic()))
        except BaseException:
            link.close()
            raise
        if problem:
            link.close()
            raise self._absent(problem.decode(errors="replace"), {})
        return link

    # ---- Talking -------------------------------------------------------------------------------------------------

    def _send(self, other: int, kind: int, payload: bytes) -> None:
        self.check()
        try:
            self._links[other].send(kind, self.rank, payload)
        except OSError:
            self._lose(f"rank {other} is gone")
            self.check()

    def _receive(self, other: int) -> bytes:
        try:
            payload = self._inbox[other].get(timeout=self._timeout)
        except queue.Empty:
            payload = None
            self._lose(f"rank {other} has not made this call for {self._timeout:g} s")
        if payload is None:
            self._inbox[other].put(None)
            self.check()
            raise ParallelError(explain("the group", f"rank {other} has left", "all ranks"))
        return payload

    def _listen(self, other: int, link: _Link) -> None:
        """Read messages until the process leaves or is lost."""
        lost = ""
        while not lost and not self._closed.is_set():
            try:
                kind, _, payload = link.receive(SILENCE_SECONDS)
            except TimeoutError:
                lost = f"rank {other} has said nothing for {SILENCE_SECONDS:g} s"
            except (OSError, _BadMessageError):
                lost = f"rank {other} has ended"
            else:
                if kind == _GATHER:
                    self._inbox[other].put(payload)
                elif kind == _LOST:
                    lost = payload.decode(errors="replace")
                elif kind == _LEAVE:
                    self._inbox[other].put(None)
                    return
        self._lose(lost)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send(_BEAT, self.rank, b"")

    def _lose(self, what: str) -> None:
        """Record the loss, tell the other processes, and wake waiting threads."""
        with self._lock:
            if self._lost or self._closed.is_set():
                return
            self._lost = what
            callbacks = list(self._callbacks)
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(_LOST, self.rank, what.encode())
        for inbox in self._inbox.values():
            inbox.put(None)
        for callback in callbacks:
            callback()


class _BadMessageError(Exception):
    """Message from a stranger, not in this protocol."""


class _Link:
    """A connection that carries whole messages; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: int, rank: int, payload: bytes) -> None:
        with self._lock:
            self._connection.sendall(_HEADER.pack(_MAGIC, kind, rank, len(payload)) + payload)

    def receive(self, timeout: float) -> tuple[int, int, bytes]:
        self._connection.settimeout(timeout)
        magic, kind, rank, size = _HEADER.unpack(self._exactly(_HEADER.size))
        if magic != _MAGIC or size > _MAX_BYTES:
            raise _BadMessageError
        return kind, rank, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._connection.recv(min(missing, 1 << 20))
            if not part:
                raise ConnectionResetError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _parted(joined: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(joined):
        (size,) = struct.unpack_from("<Q", joined, at)
        parts.append(joined[at + 8 : at + 8 + size])
        at += 8 + size
    return parts


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ArgumentError(explain(f"environment variable {name}", repr(os.environ[name]), "an integer")) from None
