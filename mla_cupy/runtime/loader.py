"""Get a kernel: built, and loaded on a device. Everything but the first call is one look-up in a dictionary."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mla_cupy.errors import KernelCompileError, KernelNotBuiltError
from mla_cupy.runtime import cache, driver, env, launching, nvrtc, worker
from mla_cupy.runtime.build import Build, BuildRequest

logger = logging.getLogger("mla_cupy.jit")

_QUIET_SECONDS = 1.0
_TICK_SECONDS = 0.1

_builds: dict[BuildRequest, Build] = {}
_kernels: dict[tuple[launching.Driver, BuildRequest, int], launching.LoadedKernel] = {}
_locks: dict[BuildRequest, threading.Lock] = {}


def obtain(request: BuildRequest) -> Build:
    """The build of `request`: from memory, `MLA_CUPY_CUBIN_DIR`, the cache, the background, or compiled now.

    Raises
    ------
    KernelCompileError
        If it must be compiled and cannot be.
    KernelNotBuiltError
        If it must be compiled and `MLA_CUPY_JIT=off`.
    """
    build = _builds.get(request)
    if build is None:
        with _locks.setdefault(request, threading.Lock()):
            build = _builds.get(request)
            if build is None:
                build = _builds[request] = _obtain(request)
    return build


def loaded(request: BuildRequest, device: int, stream: int = 0) -> launching.LoadedKernel:
    """The kernel of `request` on `device`, ready to launch on `stream`.

    Raises
    ------
    KernelNotBuiltError
        If it is not loaded yet and `stream` is being captured into a graph, where loading is not allowed.
    """
    target = driver.current()
    key = (target, request, device)
    kernel = _kernels.get(key)
    if kernel is None:
        if target.is_capturing(stream):
            raise KernelNotBuiltError(
                f"{request.name} is not loaded and the stream is being captured into a graph: "
                "make a plan, or call the function once, before the capture"
            )
        kernel = _kernels[key] = target.load(obtain(request), device)
    return kernel


@dataclass(frozen=True)
class Outcome:
    """Outcome of one request of `build_all`: a build, or an error.

    `cache_error` explains why a build is not in the cache.
    """

    request: BuildRequest
    build: Build | None
    error: str = ""
    was_cached: bool = False
    cache_error: str = ""


def build_all(
    requests: Sequence[BuildRequest],
    jobs: int,
    on_progress: Callable[[BuildRequest, Outcome | None], None] | None = None,
) -> list[Outcome]:
    """Build `requests`, up to `jobs` at a time, each in a separate child process.

    Parameters
    ----------
    requests : sequence of BuildRequest
    jobs : int
    on_progress : callable, optional
        Called with a request and None when it is started, and with its outcome when it has ended.

    Returns
    -------
    list of Outcome
        In the order of `requests`. A kernel that does not compile is an outcome, not an exception.
    """
    outcomes: dict[BuildRequest, Outcome] = {}
    running: dict[BuildRequest, worker.Worker] = {}
    waiting = list(dict.fromkeys(requests))
    tell = on_progress or (lambda request, outcome: None)

    def finish(request: BuildRequest, outcome: Outcome) -> None:
        outcomes[request] = outcome
        tell(request, outcome)

    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                request = waiting.pop(0)
                tell(request, None)
                try:
                    found = worker.cached(request)
                    if found is None:
                        running[request] = worker.Worker([request], inline=True)
                    else:
                        finish(request, Outcome(request, found, was_cached=True))
                except KernelCompileError as error:
                    finish(request, Outcome(request, None, str(error)))
            for request, child in list(running.items()):
                if child.wait(request, _TICK_SECONDS / len(running)):
                    del running[request]
                    finish(request, _outcome(request, child))
    finally:
        for child in running.values():
            child.close()
    return [outcomes[request] for request in requests]


def forget() -> None:
    """Drop this process's memory cache, so that the next call reads the disk again. Loaded kernels stay alive."""
    _builds.clear()
    _kernels.clear()


def drop_kernels_of(target: launching.Driver) -> None:
    """Forget the kernels that `target` has loaded: they will not be launched again, and can be freed."""
    for key in [key for key in _kernels if key[0] is target]:
        del _kernels[key]


def _obtain(request: BuildRequest) -> Build:
    found = cache.prebuilt(request)
    if found is not None:
        return found
    if env.get("JIT") == "off":
        return _cached_or_refuse(request)
    found = worker.cached(request)
    if found is not None:
        return found
    background = worker.join(request)
    if background is not None:
        try:
            _watch(background, request)
            if found := background.result(request) or worker.cached(request):
                _warn_not_cached(background.cache_error(request))
                return found
        except KernelCompileError as error:
            logger.debug("in the background: %s", error)  # compiling it here says it again, to the caller
    return _compile(request)


def _cached_or_refuse(request: BuildRequest) -> Build:
    try:
        found = worker.cached(request)
    except KernelCompileError:  # no NVRTC: its version, and so the image, is unknown
        found = None
    if found is None:
        command = f"mla-cupy compile --arch {request.arch} --kernels {request.entry.removeprefix('mla_')}"
        directory = env.get("CUBIN_DIR")
        raise KernelNotBuiltError(
            f"{request.name} is not built and MLA_CUPY_JIT=off forbids compiling it: run "
            + (f"`{command} --out {directory}`" if directory else f"`{command}`, or set MLA_CUPY_CUBIN_DIR")
        )
    return found


def _compile(request: BuildRequest) -> Build:
    start = time.perf_counter()
    logger.info("compiling %s", request.name)
    build = _compile_in_child(request) if worker.can_spawn() else _compile_here(request)
    logger.info("compiled %s in %.1f s", request.name, time.perf_counter() - start)
    return build


def _compile_in_child(request: BuildRequest) -> Build:
    try:
        child = worker.Worker([request], inline=True)
    except OSError as error:
        logger.debug("no child process (%s): compiling in this one", error)
        return _compile_here(request)
    try:
        _watch(child, request)
        build = child.result(request)
        _warn_not_cached(child.cache_error(request))
    finally:
        child.close()
    assert build is not None
    return build


def _compile_here(request: BuildRequest) -> Build:
    found = cache.places()
    build, cache_error = worker.build_here(request, nvrtc.find_nvrtc(), found.read, found.write)
    _warn_not_cached(cache_error)
    return build


def _warn_not_cached(why: str) -> None:
    """Say that a kernel will be compiled again in the next process, unless `places` has said it already."""
    if why and cache.cache_dir() is not None:
        cache.warn_once(why)


class _Patience:
    """Tells the user once per process, after a second of waiting in all, why calls take so long."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.said = False

    def waited(self, seconds: float, arch: str) -> None:
        """Count further seconds of waiting for a kernel."""
        self.seconds += seconds
        if self.seconds > _QUIET_SECONDS and not self.said and _is_watched():
            self.said = True
            text = (
                f"mla_cupy: compiling kernels for {arch}, once for this machine; `mla-cupy compile` does it beforehand"
            )
            print(text, file=sys.stderr, flush=True)


_patience = _Patience()


def _is_watched() -> bool:
    """True if a user sees standard error, and the log does not already tell it."""
    if logger.isEnabledFor(logging.INFO) or sys.stderr is None:
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _watch(child: worker.Worker, request: BuildRequest) -> None:
    """Wait for `request`."""
    while not child.wait(request, _TICK_SECONDS):
        _patience.waited(_TICK_SECONDS, request.arch)


def _outcome(request: BuildRequest, child: worker.Worker) -> Outcome:
    try:
        return Outcome(request, child.result(request), cache_error=child.cache_error(request))
    except KernelCompileError as error:
        return Outcome(request, None, str(error))
    finally:
        child.close()


os.register_at_fork(after_in_child=_locks.clear)  # another thread may have held one: it does not exist in the child
