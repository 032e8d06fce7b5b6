"""A launch in several processes: each runs every n-th cluster, over memory that all of them share."""

from __future__ import annotations

import mmap
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from ..errors import SimError, StrictWarning
from ..memory.spaces import Buffer, Memory
from .findings import Finding

_POLL = 0.2
"""Seconds between two looks at the processes' progress."""


@dataclass
class Part:
    """Part of a launch that one process has done, in a form that pickles."""

    error: SimError | None = None
    steps: int = 0
    counts: list[int] = field(default_factory=list)
    traffic: list[int] = field(default_factory=list)
    counters: Counter = field(default_factory=Counter)
    waits: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    banks: dict[str, list[int]] = field(default_factory=dict)


def run(launch: Any, jobs: int) -> None:
    """Run a launch's clusters in ``jobs`` processes, and gather their counts and findings in ``launch``.

    Atomics on global memory exclude each other across the processes. The first error that a process reports is raised,
    and ends the others.
    """
    clusters = list(enumerate(launch.cluster_origins()))
    jobs = min(jobs, len(clusters))
    context = _forking()
    seed = int(launch.rng.integers(1 << 62))
    launch.exclusive = context.Lock()
    far = np.frombuffer(mmap.mmap(-1, 16 * jobs), np.int64).reshape(jobs, 2)

    def work(index: int, pipe: Connection) -> None:
        def progress(finished: int, total: int, steps: int) -> None:
            far[index] = finished, steps

        launch.rng = np.random.default_rng([seed, index])
        launch.progress = progress
        pipe.send(_run_part(launch, clusters[index::jobs]))

    with shared(launch.memory):
        for part in _parts(context, work, jobs, lambda: _report(launch, far, len(clusters))):
            _add(launch, part)
            if part.error is not None:
                raise part.error
    _report(launch, far, len(clusters))


def _forking() -> multiprocessing.context.ForkContext:
    try:
        return multiprocessing.get_context("fork")
    except ValueError:
        raise SimError("jobs= needs a system whose processes can fork") from None


def _report(launch: Any, far: np.ndarray, total: int) -> None:
    if launch.progress is not None:
        finished, steps = far.sum(0).tolist()
        launch.progress(finished, total, steps)


def _run_part(launch: Any, clusters: list) -> Part:
    """Run clusters in this process."""
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrictWarning)  # the parent warns, once
        try:
            launch.run(clusters)
            launch.progress(len(clusters), len(clusters), launch.steps)
        except SimError as caught:
            error = caught
        except Exception as caught:
            error = SimError(f"{type(caught).__name__}: {caught}")
    banks = {} if launch.banks is None else dict(launch.banks.sites)
    found = list(launch.found.values())
    return Part(
        error, launch.steps, launch.counts, launch.traffic, launch.counters, launch.waits, launch.notes, found,
        launch.printed, banks,
    )  # fmt: skip


def _parts(
    context: multiprocessing.context.ForkContext, work: Callable, jobs: int, look: Callable[[], None]
) -> Iterator[Part]:
    """Start the processes, and yield each one's results once it ends; all have ended when this generator ends."""
    running: dict[Connection, multiprocessing.context.ForkProcess] = {}
    try:
        for index in range(jobs):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(index, its), daemon=True)
            with warnings.catch_warnings():
                # Libraries of this process may have threads, and warn of it; the new process uses none of them but
                # NumPy, and no thread of NumPy is at work now.
                warnings.simplefilter("ignore")
                process.start()
            its.close()
            running[mine] = process
        while running:
            for pipe in wait(list(running), _POLL):
                assert isinstance(pipe, Connection)
                process = running[pipe]
                try:
                    part = pipe.recv()
                except EOFError:
                    process.join()
                    part = Part(SimError(f"a process of the launch has ended with status {process.exitcode}"))
                process.join()
                del running[pipe]
                yield part
            look()
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _add(launch: Any, part: Part) -> None:
    """Add a process's results to the launch."""
    launch.steps += part.steps
    for total, values in ((launch.counts, part.counts), (launch.traffic, part.traffic)):
        for at, value in enumerate(values):
            total[at] += value
    launch.counters.update(part.counters)
    for name, (times, steps) in part.waits.items():
        entry = launch.waits.setdefault(name, [0, 0])
        entry[0] += times
        entry[1] += steps
    for text in part.notes:
        launch.note(text)
    for finding in part.found:
        (launch.warn if finding.severity == "warning" else launch.keep)(finding)
    launch.printed += part.printed
    for site, values in part.banks.items():
        launch.banks.sites[site] = [a + b for a, b in zip(launch.banks.sites[site], values, strict=True)]


@contextmanager
def shared(memory: Memory) -> Iterator[None]:
    """Within a with statement, arrays that kernels can write are in memory that forked processes share."""
    moved: list[tuple[Buffer, np.ndarray]] = []
    try:
        for group in _overlapping(memory.all_buffers()):
            if any(buffer.writable for buffer in group):
                moved += _move(group)
        yield
    finally:
        for buffer, original in moved:
            if buffer.writable:
                original[:] = buffer.bytes
            buffer.place(original)


def _start(buffer: Buffer) -> int:
    return int(buffer.bytes.__array_interface__["data"][0])


def _overlapping(buffers: list[Buffer]) -> list[list[Buffer]]:
    """Buffers, together where they share bytes: an array may be mapped whole and in part."""
    groups: list[list[Buffer]] = []
    end = 0
    for buffer in sorted((each for each in buffers if each.size), key=_start):
        if not groups or _start(buffer) >= end:
            groups.append([])
        groups[-1].append(buffer)
        end = max(end, _start(buffer) + buffer.size)
    return groups


def _move(group: list[Buffer]) -> list[tuple[Buffer, np.ndarray]]:
    """Put buffers that overlap into shared memory; return them with the bytes that they had."""
    first = _start(group[0])
    whole = np.frombuffer(mmap.mmap(-1, max(_start(each) + each.size for each in group) - first), np.uint8)
    moved = []
    for buffer in group:
        offset, original = _start(buffer) - first, buffer.bytes
        target = whole[offset : offset + buffer.size]
        target[:] = original
        moved.append((buffer, original))
        buffer.place(target)
    return moved
