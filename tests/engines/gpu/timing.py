"""Time of an engine's step on the GPU and on the host, separately.

A step's time on a clock is the host's or the GPU's, whichever is longer. Here are the milliseconds of the GPU between
the ends of a replayed graph, the host's microseconds in the backend's own builder, and the kernels of a step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

NAMED = 24
"""Kernels that are told, the longest first."""
BUILDS = 200
"""Builds of each builder, in turn."""


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds of one clock."""

    name: str
    begin: float
    end: float


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Have `make` of a class's method in its place for a while."""
    own = owner.__dict__.get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def watched(run: Callable[[], Any], builders: Iterable[type] = ()) -> dict[str, Any]:
    """Run, and tell the median milliseconds of replayed graphs and the median microseconds of the builders' `build`.

    Parameters
    ----------
    run : callable
    builders : classes
        Whose `build` is timed, on the host.
    """
    import torch

    replays: list[tuple[Any, Any]] = []
    builds: list[float] = []

    def replaying(replay: Any) -> Any:
        def between_events(graph: Any) -> None:
            ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            ends[0].record()
            replay(graph)
            ends[1].record()
            replays.append(ends)

        return between_events

    def building(build: Any) -> Any:
        def on_a_clock(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            made = build(*given, **named)
            builds.append((time.perf_counter() - begun) * 1e6)
            return made

        return on_a_clock

    watches = [replaced(x, "build", building) for x in builders]
    with replaced(torch.cuda.CUDAGraph, "replay", replaying):
        for watch in watches:
            watch.__enter__()
        try:
            run()
        finally:
            for watch in reversed(watches):
                watch.__exit__(None, None, None)
    torch.cuda.synchronize()
    spans = [first.elapsed_time(last) for first, last in replays]
    told: dict[str, Any] = {"replays": len(spans), "builds": len(builds)}
    if spans:
        told |= {"graph_ms": round(statistics.median(spans), 4), "least_graph_ms": round(min(spans), 4)}
    if builds:
        told |= {"build_us": round(statistics.median(builds), 1), "least_build_us": round(min(builds), 1)}
    return told


def builders_in_turn(run: Callable[[], Any], base: type, others: Iterable[type], around: Any) -> dict[str, float]:
    """Host microseconds of `build` for one step, of the engine's builder and of others, in one process.

    Parameters
    ----------
    run : callable
        Builds steps; the last one counts.
    base : type
        Class whose `build` builders inherit.
    others : classes
        Of builders for the same cache.
    around : callable
        From a builder's configuration to a context in which others are made.

    Returns
    -------
    dict
        Medians by the names of the classes; of a step that has a plan also of its update, as "update of the plan".
    """
    last: list[Any] = []

    def kept(build: Any) -> Any:
        def keeping(builder: Any, *given: Any, **named: Any) -> Any:
            last[:] = builder, given, named
            return build(builder, *given, **named)

        return keeping

    with replaced(base, "build", kept):
        run()
    own, given, named = last
    config = own.vllm_config
    layers = list(config.compilation_config.static_forward_context)
    with around(config):
        made = [kind(own.kv_cache_spec, layers, config, own.device) for kind in others]
    found = on_a_clock({type(x).__name__: lambda x=x: x.build(*given, **named) for x in (own, *made)})
    step = own.build(*given, **named).decode
    if getattr(step, "plan", None) is not None:  # apart: a launch leaves the host with other caches
        found |= on_a_clock({"update of the plan": lambda: step.plan.update(step.seq_lens)})
    return found


def on_a_clock(runs: dict[str, Callable[[], Any]], rounds: int = BUILDS) -> dict[str, float]:
    """Median host microseconds of each, run in turn, in another order each round: what runs before costs, too."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names, draw = [*runs], random.Random(0)
    for _ in range(rounds):
        draw.shuffle(names)
        for name in names:
            begun = time.perf_counter()
            runs[name]()
            found[name].append((time.perf_counter() - begun) * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """Run under PyTorch's profiler; the kernels and copies of the GPU, by their starts."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return kernels_of(profile)


def kernels_of(profile: Any) -> list[Kernel]:
    """The kernels and copies of the GPU that a profiler of PyTorch's has seen, by their starts."""
    from torch.autograd import DeviceType

    found = [
        Kernel(x.name, x.time_range.start, x.time_range.end)
        for x in profile.events()
        if x.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def totals(kernels: Iterable[Kernel]) -> dict[str, tuple[int, float, float]]:
    """Runs, microseconds, and microseconds after the end of all before it, of each kernel by name.

    The last are what a kernel adds: one that starts early and waits for the one before counts once.
    """
    found: dict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    reached = 0.0
    for name, begin, end in kernels:
        runs, long, added = found[name]
        found[name] = runs + 1, long + end - begin, added + max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return dict(found)


def per_step(short: Iterable[Kernel], long: Iterable[Kernel], steps: int) -> list[dict[str, Any]]:
    """Kernels of a decode step, from two traces, one with `steps` more of them; the largest come first."""
    before, after = totals(short), totals(long)
    rows = []
    for name, values in after.items():
        runs, us, added = ((y - x) / steps for x, y in zip(before.get(name, (0, 0.0, 0.0)), values, strict=True))
        if runs > 0:
            rows.append({"kernel": name[:120], "runs": round(runs, 2), "us": round(us, 2), "added_us": round(added, 2)})
    return sorted(rows, key=lambda row: -row["added_us"])[:NAMED]
