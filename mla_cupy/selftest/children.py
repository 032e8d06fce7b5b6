"""Probes in child processes: bad device code may hang, and an illegal instruction ends its CUDA context.

A child runs one probe after the other and prints one JSON line for each. After any other answer, or too long a silence,
it is killed, and the next probe gets another child.

Run as `python -m mla_cupy.selftest.children` it is such a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mla_cupy.runtime import env
from mla_cupy.selftest import catalog
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Probe
from mla_cupy.selftest.trial import DIED, HUNG, Result, attempt

START_SECONDS = 120.0
"""Time limit of the imports and the CUDA context."""
MAX_STARTS = 2
"""Failures in a row after which no further child is started."""
_LAST_WORDS = 5
_ANSWERS = {"ready", "error", "status"}
"""One of them is in every answer; other lines are noise of libraries."""
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mla_cupy.selftest.children import main
main()
"""


class Children:
    """One child at a time, started when it is needed.

    command
        Command to start instead of a child of this module: for tests.
    """

    def __init__(self, place: Place, command: Sequence[str] = (), start_seconds: float = START_SECONDS) -> None:
        path = [*sys.path, str(Path(__file__).resolve().parents[2])]
        self._command = list(command) or [sys.executable, "-I", "-c", _START, json.dumps(path)]
        self._place = place
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._noise: list[str] = []
        self._not_begun: list[str] = []

    def run(self, probe: Probe) -> Result:
        """Have a child run it."""
        start = time.perf_counter()

        def ended(status: str, message: str) -> Result:
            self.close()
            return Result(probe.name, status, round(time.perf_counter() - start, 3), message)

        if len(self._not_begun) >= MAX_STARTS:
            return ended(DIED, f"not tried: {MAX_STARTS} processes in a row could not begin: {self._not_begun[-1]}")
        try:
            if self._process is None and (status := self._begin()):
                return ended(status, f"before it began: {self._not_begun[-1]}")
            self._send(probe.name)
            answer = self._receive(probe.seconds)
        except (OSError, EOFError):
            return ended(DIED, self._last_words())
        if answer is None:
            return ended(HUNG, f"no answer after {probe.seconds:g} s; the process was killed")
        result = Result(**answer)
        if result.status == DIED:  # the context may be of no use any more
            self.close()
        return result

    def close(self) -> None:
        """End the child, at work or not."""
        process, self._process = self._process, None
        self._text = b""
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # the driver may hold it for a while
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _begin(self) -> str:
        """Start a child and wait until it has its context; the reason if it has none, else ""."""
        try:
            self._start()
            answer = self._receive(self._start_seconds)
        except (OSError, EOFError):
            answer = {"error": self._last_words()}
        if answer is None:
            self._not_begun.append(f"no CUDA context after {self._start_seconds:g} s")
            return HUNG
        if "error" in answer:
            self._not_begun.append(str(answer["error"]))
            return DIED
        self._not_begun = []
        return ""

    def _start(self) -> None:
        self._noise = []
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env.child_environment(),
        )
        self._send(json.dumps(asdict(self._place)))

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The child's next answer; None if there is none in time. Raises EOFError if the child has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(out, select.POLLIN)
        while True:
            line, found, rest = self._text.partition(b"\n")
            if found:
                self._text = rest
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict) and answer.keys() & _ANSWERS:
                        return answer
                self._noise.append(line.decode("utf-8", "replace"))
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(int(left * 1000) + 1):
                return None
            block = os.read(out, 1 << 16)
            if not block:
                raise EOFError
            self._text += block

    def _last_words(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "; ".join([f"the process ended: {how}", *self._noise[-_LAST_WORDS:]])


def main() -> None:
    """The child: a place, then names, on lines of standard input. It ends with its parent, even in a hung probe."""
    names: queue.Queue[str] = queue.Queue()
    place = Place(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_read_names, args=(names,), daemon=True).start()
    probes = {probe.name: probe for probe in catalog.probes(place.arch)}
    try:
        with opened(place) as machine:
            machine.upload(np.zeros(1, np.float32))  # makes the context
            _say(ready=True)
            while True:
                result = attempt(probes[names.get()], machine)
                _say(**asdict(result))
    except Exception as error:
        _say(error=f"{type(error).__name__}: {error}")


def _read_names(names: queue.Queue[str]) -> None:
    for line in sys.stdin:
        names.put(line.strip())
    os._exit(0)


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
