"""Compile in child processes, never in the caller's.

A compilation takes seconds inside native code. On a daemon thread it crashes the interpreter at exit, in a pool of
threads it blocks exit, and a process forked meanwhile hangs in its own first compilation (NVRTC's locks are copied
locked). So every compilation runs in a separate process, spawned and not forked. Such a child ends with us: it is
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

from mla_cupy.errors import KernelCompileError, explain
from mla_cupy.runtime import cache, env, lock, nvrtc
from mla_cupy.runtime.build import Build, BuildRequest, compile_kernel
from mla_cupy.runtime.pulse import PATIENCE_SECONDS, Pulse

logger = logging.getLogger("mla_cupy.jit")

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mla_cupy.runtime.worker import main
main()
"""
_EXIT_SECONDS = 10.0
"""Time to wait for a child that was killed: one that waits for a dead disk cannot end."""
_CACHE_REMEDY = "set MLA_CUPY_CACHE_DIR to a writable directory with free space"


@dataclass(frozen=True)
class _Task:
    """Task of a child: everything it needs, so that it makes no decisions."""

    nvrtc: str
    read: list[str]
    write: str | None
    inline: bool
    requests: list[dict[str, Any]]


class Worker:
    """A child process that compiles `requests` one after the other.

    Several threads may wait for it at once. `inline` makes it send the builds back through its pipe; without, it
    only leaves them in the cache.

    All have the priority of this process: on a busy machine, a call that joins one would otherwise wait longer than for
    a compilation of its own.
    """

    def __init__(self, requests: Sequence[BuildRequest], *, inline: bool) -> None:
        found = cache.places()
        write = str(found.write) if found.write else None
        described = [asdict(request) for request in requests]
        task = _Task(nvrtc.find_nvrtc(), [str(path) for path in found.read], write, inline, described)
        self.requests = tuple(requests)
        self._states: dict[BuildRequest, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._text = b""
        self._noise: list[str] = []
        self._stuck = False
        self._process = _spawn()
        self._pulse = Pulse(self._process.pid)
        _alive.append(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, request: BuildRequest, seconds: float) -> bool:
        """Wait up to `seconds` for `request`; True once there is something to say about it.

        A child that gets no further, since it is stopped or frozen, is ended.
        """
        if not self._finished(request):
            poll = select.poll()
            poll.register(self._out, select.POLLIN)
            if poll.poll(int(seconds * 1000)):
                self._receive()
            elif self._pulse.is_still(seconds):
                self._stuck = True
                self._kill()
        return self._finished(request)

    def started(self, request: BuildRequest) -> bool:
        """True if the child is at work on `request` or done with it."""
        with contextlib.suppress(OSError):
            self.wait(request, 0)
        return request in self._states

    def result(self, request: BuildRequest) -> Build | None:
        """Outcome of `request`: a build, or None if it was only put in the cache.

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
        if self._stuck:
            raise KernelCompileError(
                f"{request.name}: the compiler process did nothing for {PATIENCE_SECONDS:g} s and was ended; call again"
            )
        code = self._process.poll()
        said = "\n".join(self._noise[-20:])
        raise KernelCompileError(f"{request.name}: the compiler process ended with code {code}\n{said}".rstrip())

    def cache_error(self, request: BuildRequest) -> str:
        """Error that kept the build of `request` out of the cache, or ""."""
        return str(self._states.get(request, {}).get("cache_error", ""))

    def close(self) -> None:
        """End the child, at work or not."""
        if self in _alive:
            _alive.remove(self)
        self._kill()
        self._close_pipes()

    def disown(self) -> None:
        """Leave the worker to the parent, in a forked child: without our end of its pipe it sees the parent end."""
        self._process.returncode = 0  # not our child: never wait for it
        self._close_pipes()

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _finished(self, request: BuildRequest) -> bool:
        state = self._states.get(request, {})
        return "done" in state or "error" in state or self._stuck or self._process.returncode is not None

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
    """Compile uncached `requests` in the background. Never raises; errors surface on the first call."""
    try:
        missing = [request for request in requests if cached(request) is None]
        if missing and cache.cache_dir() is not None:
            jobs = min(4, len(missing), -(-len(os.sched_getaffinity(0)) // 3))
            for job in range(jobs):
                _background.append(Worker(missing[job::jobs], inline=False))
    except Exception as error:  # a warning too, where those are errors
        logger.debug("no compilation in the background: %s", error)


def join(request: BuildRequest) -> Worker | None:
    """The background worker that is at work on `request`, or has ended it; None if that is for the caller to do."""
    for worker in _background:
        if request in worker.requests and worker.started(request):
            return worker
    return None


def cached(request: BuildRequest) -> Build | None:
    """The build of `request` in `MLA_CUPY_CUBIN_DIR` or the cache, if any."""
    found = cache.prebuilt(request)
    if found is not None:
        return found
    return _read(request, nvrtc.find_nvrtc(), cache.places().read)


def build_here(request: BuildRequest, nvrtc_path: str, read: Sequence[Path], write: Path | None) -> tuple[Build, str]:
    """Compile `request` in this thread, unless it is cached; returns the build, and why it is not on disk now or ""."""
    entry = write / cache.entry_name(request, nvrtc_path) if write else None
    with lock.building(entry):
        if found := _read(request, nvrtc_path, read):
            return found, ""
        build = compile_kernel(request, nvrtc.load(nvrtc_path))
        if entry is None:
            return build, explain("the kernel cache", "no directory that can be written", "one", _CACHE_REMEDY)
        try:
            cache.write(entry, build, cache.image_key(request))
        except OSError as error:
            got = error.strerror or str(error)
            return build, explain(f"the kernel cache {write}", got, "room for the compiled kernels", _CACHE_REMEDY)
        return build, ""


def can_spawn() -> bool:
    """True if this interpreter can be started again: an embedded one cannot."""
    return bool(sys.executable) and os.access(sys.executable, os.X_OK)


def main() -> None:
    """The child: see the module's docstring."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    write = Path(task["write"]) if task["write"] else None
    read = [Path(path) for path in task["read"]]
    for index, fields in enumerate(task["requests"]):
        fields["defines"] = tuple((name, value) for name, value in fields["defines"])
        _say(index=index, start=True)
        try:
            build, cache_error = build_here(BuildRequest(**fields), task["nvrtc"], read, write)
            sent = _encode(build) if cache_error or task["inline"] else None
            _say(index=index, done=True, build=sent, cache_error=cache_error)
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


def _read(request: BuildRequest, nvrtc_path: str, directories: Sequence[Path]) -> Build | None:
    """The build of `request` in one of `directories`: one that is named like it may still be another's."""
    name, key = cache.entry_name(request, nvrtc_path), cache.image_key(request)
    for directory in directories:
        found = cache.read(directory / name)
        if found is not None and found.info["image_key"] == key:
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
        "info": build.info,
    }


def _decode(fields: dict[str, Any]) -> Build:
    return Build(base64.b64decode(fields["cubin"]), base64.b64decode(fields["ptx"]), fields["info"])


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
