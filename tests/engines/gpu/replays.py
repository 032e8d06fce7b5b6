"""GPU time of SGLang's replayed graphs, without the host, measured in the process that replays them.

SGLang runs its model in processes of their own. `sglang_check --speed --graphs` puts the folder `watch` on the path of
all of them, so that each calls `watch` when it starts; the one that imports the module that replays graphs has them
timed, between events, while a file is there, and profiled kernel by kernel while another is. Readings are written
beside them. Where graphs are timed nothing waits for the GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.engines.gpu.timing import kernels_of, per_step

SWITCH = "MLA_CUPY_ENGINE_REPLAYS"
"""Environment variable: the file that is there while graphs are timed. One with `TRACE` behind its name asks more."""
TRACE = ".trace"
REPLAYER = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
AT_ONCE = 8
"""Readings that are written together: each writing keeps the host from its next step."""
SETTLED = 0.2
"""Seconds before a file is there: an engine may replay once more after its last answer."""
TRACED = 16
"""Replays that are profiled kernel by kernel, with what runs between them."""


def watch() -> None:
    """Begin, in a process that has just started, if the environment says so."""
    if os.environ.get(SWITCH):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Has replays timed when the module that replays has been imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REPLAYER:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            run = loader.exec_module

            def run_and_install(module: ModuleType) -> None:
                run(module)
                import torch

                kind, switch = torch.cuda.CUDAGraph, Path(os.environ[SWITCH])
                timing = timed(kind.replay, torch.cuda.Event, switch)
                kind.replay = traced(timing, torch, trace_switch(switch))  # type: ignore[method-assign]

            loader.exec_module = run_and_install
        return found


def timed(replay: Callable[[Any], None], event: Callable[..., Any], switch: Path) -> Callable[[Any], None]:
    """Replay as `replay` does; while the file `switch` is there, between events whose times are written beside it."""
    under_way: deque[tuple[Any, Any]] = deque()
    found: list[float] = []
    run = ""

    def replaying(graph: Any) -> None:
        nonlocal run
        wanted = current_run(switch)
        if wanted != run:
            run = wanted
            under_way.clear()
            found.clear()
        if not run:
            replay(graph)
            return
        ends = event(enable_timing=True), event(enable_timing=True)
        ends[0].record()
        replay(graph)
        ends[1].record()
        under_way.append(ends)
        while under_way and under_way[0][1].query():
            first, last = under_way.popleft()
            found.append(first.elapsed_time(last))
            if len(found) % AT_ONCE == 0:
                write(readings_of(switch), found)

    return replaying


def traced(replay: Callable[[Any], None], torch: Any, switch: Path) -> Callable[[Any], None]:
    """Replay as `replay` does; of the first so many while the file `switch` is there, write the kernels beside it."""
    profiles: list[Any] = []
    count, run = 0, ""

    def replaying(graph: Any) -> None:
        nonlocal count, run
        wanted = current_run(switch)
        if wanted != run:
            count, run = 0, wanted
            while profiles:  # of a run that had too few replays
                profiles.pop().stop()
        count += bool(run)
        if count == 1:
            torch.cuda.synchronize()
            profiles.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]))
            profiles[-1].start()
        replay(graph)
        if count == TRACED:
            torch.cuda.synchronize()
            profiles[-1].stop()
            write(readings_of(switch), per_step([], kernels_of(profiles.pop()), TRACED))

    return replaying


def current_run(switch: Path) -> str:
    """The run whose graphs are requested; None if the file does not exist."""
    try:
        return switch.read_text()
    except FileNotFoundError:
        return ""


def trace_switch(switch: Path) -> Path:
    """The file that is there while kernels are profiled."""
    return switch.with_name(switch.name + TRACE)


def readings_of(switch: Path) -> Path:
    """Path of a file's measurements."""
    return switch.with_name(switch.name + ".json")


def write(path: Path, values: Any) -> None:
    """Write JSON; who reads finds the old one or the new one whole."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(values))
    draft.replace(path)


def readings_while(switch: Path, run: Callable[[], Any]) -> Any:
    """Run with the file there, while another process replays graphs; what that process wrote, or None."""
    time.sleep(SETTLED)
    readings_of(switch).unlink(missing_ok=True)
    draft = switch.with_name(switch.name + ".draft")
    draft.write_text(str(time.time_ns()))
    draft.replace(switch)
    try:
        run()
    finally:
        switch.unlink()
    return json.loads(readings_of(switch).read_text()) if readings_of(switch).exists() else None


def graph_times(switch: Path, run: Callable[[], Any]) -> dict[str, Any]:
    """The median milliseconds of what was replayed while `run` ran, and the least; empty where nothing was timed."""
    spans = readings_while(switch, run)
    if not spans:
        return {}
    return {
        "replays": len(spans),
        "graph_ms": round(statistics.median(spans), 4),
        "least_graph_ms": round(min(spans), 4),
    }
