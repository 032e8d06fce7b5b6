"""Detection of a stalled child process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

PATIENCE_SECONDS = 5.0
"""Time for which a process may do nothing at all. One that runs on a busy machine does something within a second."""

_USER_TICKS, _SYSTEM_TICKS, _NICENESS = 11, 12, 16  # in /proc/PID/stat, behind the name


class Pulse:
    """Signs of life of the process `pid`: stopped, frozen and deadlocked ones show none."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._before: tuple[str, ...] = ()
        self._still = 0.0

    def is_still(self, waited: float) -> bool:
        """True if it has done nothing for `PATIENCE_SECONDS`, including the `waited` seconds just now.

        Our own waiting is added up, not the time of a clock, because both processes may have been stopped. A process
        without any information counts as working.
        """
        now = self._sign()
        if now != self._before or not now:
            self._before, self._still = now, 0.0
        else:
            self._still += waited
        return self._still >= PATIENCE_SECONDS

    def yields_to_us(self) -> bool:
        """True if it has a lower priority than we have, so that on a busy machine we would be faster."""
        fields = _fields(self.pid)
        return bool(fields) and int(fields[_NICENESS]) > os.nice(0)

    def _sign(self) -> tuple[str, ...]:
        """Signature that changes whenever the process runs: its CPU time and its context switches."""
        fields = _fields(self.pid)
        if not fields:
            return ()
        return fields[_USER_TICKS], fields[_SYSTEM_TICKS], *_switches(self.pid)


def _fields(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(")")[2].split()


def _switches(pid: int) -> list[str]:
    return [line for line in _read(pid, "status").splitlines() if "ctxt_switches" in line]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
