"""One process at a time builds a kernel, so that eight that start together do not do the same work."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from mla_cupy.runtime import trust
from mla_cupy.runtime.pulse import Pulse

_MAX_SECONDS = 120.0
_TICK_SECONDS = 0.05


@contextlib.contextmanager
def building(entry: Path | None) -> Iterator[None]:
    """Hold the lock of an entry within a with statement.

    Only a courtesy. It gives up if the file system has no locks, after two minutes, and if the holder is stopped or has
    a lower priority than this process: then building it twice is faster.
    """
    with contextlib.ExitStack() as stack:
        if entry is not None:
            with contextlib.suppress(OSError):
                trust.make_private(entry.parent / ".locks")
                path = entry.parent / ".locks" / entry.name
                # Without O_NONBLOCK opening a FIFO waits.
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)
                _lock(descriptor)
        yield


def _lock(descriptor: int) -> None:
    end = time.monotonic() + _MAX_SECONDS
    holder = Pulse(0)
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (pid := _holder(descriptor)) != holder.pid:
                holder = Pulse(pid)
            if holder.is_still(_TICK_SECONDS) or holder.yields_to_us():
                return
            time.sleep(_TICK_SECONDS)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d" % os.getpid(), 0)
            return


def _holder(descriptor: int) -> int:
    """The process that has the lock, as it has written; 0 if it has not."""
    text = os.pread(descriptor, 20, 0)
    return int(text) if text.isdigit() else 0
