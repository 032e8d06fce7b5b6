"""Compile in child processes, never in the caller's.

A compilation takes seconds inside native code. On a daemon thread it crashes the interpreter at exit, in a pool of
threads it blocks exit, and a process forked meanwhile hangs in its own first compilation (NVRTC's locks are copied
locked). So every compilation runs in a process of its own, spawned and not forked. Such a child ends with us: it is
killed at exit, and it watches its standard input, which closes however we end.

Run as `python -m mla_cupy.runtime.worker` it reads one JSON line (see `_Task`) and answers with one line per event.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_cupy.errors import KernelCompileError
from mla_cupy.runtime import cache, env, nvrtc
from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel

logger = logging.getLogger("mla_cupy.jit")

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mla_cupy.runtime.worker import main
main()
"""
_BACKGROUND_NICENESS = 5


@dataclass(frozen=True)
class _Task:
    """What a child is told: everything, so that it decides nothing of its own."""

    nvrtc: str
    read: list[str]
    write: str | None
    niceness: int
    inline: bool
    requests: list[dict[str, Any]]


class Worker:
    """A child process that compiles `requests` one after the other.

    Several threads may wait for it at once. `inline` makes it send the builds back through its pipe; without, it
    only leaves them in the cache.
    """

    def __init__(self, requests: Sequence[BuildRequest], *, inline: bool, niceness: int = 0) -> None:
        found = cache.places()
        write = str(found.write) if found.write else None
        described = [asdict(request) for request in requests]
        task = _Task(nvrtc.find_nvrtc(), [str(path) for path in found.read], write, niceness, inline, described)
        self.requests = tuple(requests)
        self._states: dict[BuildRequest, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._text = b""
        self._noise: list[str] = []
        self._process = _spawn()
        _alive.append(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, request: BuildRequest, seconds: float) -> bool:
        """Wait up to `seconds` for `request`; True once there is something to say about it."""
        if not self._finished(request):
            poll = select.poll()
            poll.register(self._out, select.POLLIN)
            if poll.poll(int(seconds * 1000)):
                self._receive()
        return self._finished(request)

    def started(self, request: BuildRequest) -> bool:
        """Whether the child is at work on `request` or done with it."""
        with contextlib.suppress(OSError):
            self.wait(request, 0)
        return request in self._states

    def result(self, request: BuildRequest) -> Build | None:
        """What became of `request`: a build, or None if it was only put in the cache.

        Raises
        ------
        KernelCompileError
            As `compile_kernel`, or because the child ended without a word.
        """
        state = self._states.get(request, {})
        if message := state.get("error"):
            raise KernelCompileError(message)
        if "done" in state:
            return _decode(state["build"]) if state["build"] else None
        code = self._process.poll()
        said = "\n".join(self._noise[-20:])
        raise KernelCompileError(f"{request.name}: the compiler process ended with code {code}\n{said}".rstrip())

    def close(self) -> None:
        """End the child, at work or not."""
        if self in _alive:
            _alive.remove(self)
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def disown(self) -> None:
        """In a forked child: this worker belongs to the parent. Without our end of its pipe it sees the parent end."""
        self._process.returncode = 0  # not our child: never wait for it
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _finished(self, request: BuildRequest) -> bool:
        state = self._states.get(request, {})
        return "done" in state or "error" in state or self._process.returncode is not None

    def _receive(self) -> None:
        with self._lock:
            if not select.select([self._out], [], [], 0)[0]:
                return  # another thread was faster
            block = os.read(self._out, 1 << 20)
            if not block:
                self._process.wait()
            *lines, self._text = (self._text + block).split(b"\n")
            for line in lines:
                self._understand(line.decode("utf-8", "replace"))

    def _understand(self, line: str) -> None:
        try:
            event = json.loads(line)
            request = self.requests[event["index"]]
        except (ValueError, TypeError, KeyError):
            self._noise.append(line)
        else:
            self._states.setdefault(request, {}).update(event)


def start(requests: Sequence[BuildRequest]) -> None:
    """Compile those of `requests` that are not cached, in the background. Never raises: the first call will say it."""
    try:
        missing = [request for request in requests if cached(request) is None]
        if missing and cache.cache_dir() is not None:
            jobs = min(4, len(missing), max(1, (os.cpu_count() or 1) // 4))
            for job in range(jobs):
                _background.append(Worker(missing[job::jobs], inline=False, niceness=_BACKGROUND_NICENESS))
    except (KernelCompileError, OSError) as error:
        logger.debug("no compilation in the background: %s", error)


def join(request: BuildRequest) -> Worker | None:
    """The background worker that is at work on `request`, or has ended it; None if that is for the caller to do."""
    for worker in _background:
        if request in worker.requests and worker.started(request):
            return worker
    return None


def cached(request: BuildRequest) -> Build | None:
    """The build of `request` that lies in `MLA_CUPY_CUBIN_DIR` or the cache, if any."""
    found = cache.prebuilt(request)
    if found is not None:
        return found
    name = cache.entry_name(request, nvrtc.find_nvrtc())
    return _read(name, cache.places().read)


def build_here(request: BuildRequest, nvrtc_path: str, read: Sequence[Path], write: Path | None) -> tuple[Build, bool]:
    """Compile `request` in this thread, unless it is cached; returns the build and whether it is on disk now."""
    name = cache.entry_name(request, nvrtc_path)
    entry = write / name if write else None
    with cache.building(entry):
        if found := _read(name, read):
            return found, True
        build = compile_kernel(request, nvrtc.load(nvrtc_path))
        if entry is not None:
            with contextlib.suppress(OSError):
                cache.write(entry, build, cache.image_key(request))
                return build, True
        return build, False


def can_spawn() -> bool:
    """Whether this interpreter can be started again: an embedded one cannot."""
    return bool(sys.executable) and os.access(sys.executable, os.X_OK)


def main() -> None:
    """The child: see the module's docstring."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(task["niceness"])
    write = Path(task["write"]) if task["write"] else None
    read = [Path(path) for path in task["read"]]
    for index, fields in enumerate(task["requests"]):
        fields["defines"] = tuple((name, value) for name, value in fields["defines"])
        _say(index=index, start=True)
        try:
            build, stored = build_here(BuildRequest(**fields), task["nvrtc"], read, write)
            _say(index=index, done=True, build=None if stored and not task["inline"] else _encode(build))
        except KernelCompileError as error:
            _say(index=index, error=str(error))
    sys.stdout.flush()
    os._exit(0)  # the thread still reads; nothing here needs cleaning up


def _spawn() -> subprocess.Popen[bytes]:
    # -I keeps the user's directory from shadowing modules while the interpreter starts; then the child sees ours.
    path = [*sys.path, str(Path(__file__).resolve().parents[2])]
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _START, json.dumps(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env.child_environment(),
    )


def _read(name: str, directories: Sequence[Path]) -> Build | None:
    for directory in directories:
        if found := cache.read(directory / name):
            return found
    return None


def _say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _encode(build: Build) -> dict[str, Any]:
    return {
        "cubin": base64.b64encode(build.cubin).decode(),
        "ptx": base64.b64encode(build.ptx).decode(),
        "record": build.record,
    }


def _decode(fields: dict[str, Any]) -> Build:
    return Build(base64.b64decode(fields["cubin"]), base64.b64decode(fields["ptx"]), fields["record"])


_alive: list[Worker] = []
_background: list[Worker] = []


@atexit.register
def _end_all() -> None:
    for worker in list(_alive):
        worker.close()


def _forget_in_fork() -> None:
    for worker in _alive:
        worker.disown()
    _alive.clear()
    _background.clear()


os.register_at_fork(after_in_child=_forget_in_fork)

if __name__ == "__main__":
    main()
