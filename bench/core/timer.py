"""Timing by CUDA graph replay, cold L2, medians; and the host time of a call.

One sample is the time of one replay divided by the number of calls in it. The calls rotate over input sets
whose bytes together exceed three times the L2, so that no call finds its inputs there. Before each replay a
large fill keeps the GPU busy while the host queues the graph, so that a sample contains no host time; the fill also
evicts all inputs from the L2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

L2_FACTOR = 3
MIN_CALLS = 4  # a graph of fewer long calls would measure the ramp of the clock
HEAD_START_BYTES = 1 << 30  # about 0.3 ms of fill on a large GPU: longer than queueing any graph here takes
HOST_WARMUP = 3  # calls before a host time is measured: a first repetition may still fill a cache


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the samples of one benchmark."""

    us_median: float
    us_p20: float
    us_p80: float
    replays: int
    calls: int

    @property
    def spread(self) -> float:
        """Distance of the 20th and the 80th percentile as a share of the median."""
        return (self.us_p80 - self.us_p20) / self.us_median


class Clock(Protocol):
    """A stopwatch on the GPU's stream."""

    def start(self) -> None: ...

    def stop_us(self) -> float:
        """Microseconds since `start`, after waiting for the work queued in between."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the order statistics, as NumPy's default does."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(samples_us: Sequence[float], calls: int) -> Timing:
    """Median and percentiles of per-call samples."""
    if not samples_us:
        raise ValueError("samples_us: got none, expected at least one")
    ordered = sorted(samples_us)
    return Timing(percentile(ordered, 0.5), percentile(ordered, 0.2), percentile(ordered, 0.8), len(ordered), calls)


def set_count(bytes_per_set: int, l2_bytes: int) -> int:
    """Input sets needed so that together they exceed three times the L2; at least two."""
    return max(2, L2_FACTOR * l2_bytes // bytes_per_set + 1)


def rotation(sets: int) -> list[int]:
    """The input set of each call of one replay: every set in turn, whole rounds, at least `MIN_CALLS` calls."""
    rounds = -(-MIN_CALLS // sets)
    return list(range(sets)) * rounds


def sample(clock: Clock, replay: Callable[[], object], calls: int, replays: int, warmup: int = 0) -> list[float]:
    """Microseconds per call of each of `replays` replays, after `warmup` untimed ones."""
    for _ in range(warmup):
        replay()
    samples = []
    for _ in range(replays):
        clock.start()
        replay()
        samples.append(clock.stop_us() / calls)
    return samples


def host_us(
    calls: Sequence[Callable[[], object]],
    synchronize: Callable[[], object],
    *,
    batches: int = 9,
    per_batch: int = 20,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Median host microseconds per eager call: the time to queue a batch, without waiting for the GPU.

    A batch must stay far below the depth of the launch queue, beyond which the host would wait for the GPU.
    """
    for index in range(max(HOST_WARMUP, len(calls))):
        calls[index % len(calls)]()
    times = []
    for _ in range(batches):
        synchronize()
        begin = now()
        for index in range(per_batch):
            calls[index % len(calls)]()
        times.append((now() - begin) * 1e6 / per_batch)
    synchronize()
    return percentile(sorted(times), 0.5)


class CudaClock:
    """CUDA events on one stream; each start is queued behind a fill that gives the host a head start."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._stream = stream
        self._fill = cupy.empty(HEAD_START_BYTES, dtype="uint8")
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._elapsed_ms: Callable[[Any, Any], float] = cupy.cuda.get_elapsed_time

    def start(self) -> None:
        self._fill.data.memset_async(0, self._fill.nbytes, self._stream)
        self._events[0].record(self._stream)

    def stop_us(self) -> float:
        self._events[1].record(self._stream)
        self._events[1].synchronize()
        return self._elapsed_ms(*self._events) * 1e3
