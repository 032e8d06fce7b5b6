"""Interface of a group's members, processes or threads, that transports use; and a group of threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from mla_cupy.errors import ArgumentError, ParallelError, explain
from mla_cupy.ops.checks import MAX_CP_WORLD, check_count, is_integer, is_number

DEFAULT_TIMEOUT = 60.0
"""Seconds that a member waits for the others."""
MAX_TIMEOUT = 1e9
"""Longest timeout in seconds, decades: some systems' locks accept no longer wait."""


@runtime_checkable
class Group(Protocol):
    """One member's view of its group."""

    @property
    def world(self) -> int:
        """Number of members."""

    @property
    def rank(self) -> int:
        """Number of this member, starting at 0."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Gather every member's object, in the order of the ranks; all of them must call it.

        Raises
        ------
        ParallelError
            If a member is gone, or does not call it in time.
        """

    def check(self) -> None:
        """Raise ParallelError if a member is gone."""

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Register a callback to be called, from another thread, as soon as a member is gone."""


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A callback for `Group.on_loss` that calls `method` while its object lives, and does not keep it alive.

    If a transport and a group kept each other alive, Python's garbage collector would free their memory at an arbitrary
    time. Freeing waits for the GPU, perhaps for an exchange of other transports that this very thread must join.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def check_world(world: Any, rank: Any) -> tuple[int, int]:
    """Convert both to Python integers; raises ArgumentError unless `rank` is one of `world` ranks."""
    world = check_count("world", world, 1, MAX_CP_WORLD)
    if not is_integer(rank) or not 0 <= rank < world:
        raise ArgumentError(explain("rank", repr(rank), f"an integer from 0 to world - 1 = {world - 1}"))
    return world, int(rank)


def check_timeout(timeout: Any) -> float:
    """Convert seconds to a Python float; raises ArgumentError unless they are valid."""
    if not is_number(timeout) or not 0 < timeout < MAX_TIMEOUT:
        raise ArgumentError(explain("timeout", repr(timeout), "seconds, above 0"))
    return float(timeout)


class LocalGroup:
    """A group of threads of one process.

    Parameters
    ----------
    world : int
    timeout : float
        Seconds that a member waits for the others.

    Examples
    --------
    >>> from mla_cupy.parallel import LocalGroup
    >>> LocalGroup(1).member(0).gather(b"alone")
    [b'alone']
    """

    def __init__(self, world: int, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.world = world = check_world(world, 0)[0]
        self._barrier = threading.Barrier(world, timeout=check_timeout(timeout))
        self._payloads = [b""] * world
        self._lock, self._callbacks = threading.Lock(), list[Callable[[], None]]()

    def member(self, rank: int) -> Group:
        """The view of one thread."""
        return _Thread(self, check_world(self.world, rank)[1])

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        """See `Group.gather`."""
        try:
            self._payloads[rank] = payload
            self._barrier.wait()
            gathered = list(self._payloads)
            self._barrier.wait()  # no member writes the next payload before all have read this one
        except threading.BrokenBarrierError:
            self._lose()
            remedy = "every member must make the same calls"
            raise ParallelError(explain("the group", "no word from all members", "one in time", remedy)) from None
        return gathered

    def check(self) -> None:
        """Raise ParallelError if a member has given up."""
        if self._barrier.broken:
            raise ParallelError(explain("the group", "a member that gave up waiting", "all of them", "start anew"))

    def on_loss(self, callback: Callable[[], None]) -> None:
        """See `Group.on_loss`."""
        with self._lock:
            self._callbacks.append(callback)
        if self._barrier.broken:
            self._lose()

    def _lose(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _Thread:
    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.world, self.rank = group.world, rank
        self._group = group

    def gather(self, payload: bytes) -> list[bytes]:
        return self._group.exchange(self.rank, payload)

    def check(self) -> None:
        self._group.check()

    def on_loss(self, callback: Callable[[], None]) -> None:
        self._group.on_loss(callback)
