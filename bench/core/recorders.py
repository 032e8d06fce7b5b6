"""Recorders, which make a list of calls one replay, timed between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

Call = Callable[[], object]


class Recorder(Protocol):
    """Turns calls into one replay."""

    method: str

    def current(self) -> AbstractContextManager[object]:
        """Makes the benchmark's stream the current one of the library that the calls belong to."""

    def record(self, calls: Sequence[Call]) -> Call: ...


GRAPH, EVENTS = "graph", "events"
METHODS = (GRAPH, EVENTS)  # of `--method`; each row says how it was timed


class Eager:
    """Makes the calls one by one, for work that cannot be captured; short calls are then host-bound."""

    def __init__(self, method: str = "eager") -> None:
        self.method = method

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, calls: Sequence[Call]) -> Call:
        def replay() -> None:
            for call in calls:
                call()

        return replay


class CupyGraph:
    """Captures the calls into one CUDA graph on a CuPy stream, which must be the current one."""

    method = "cuda-graph"

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, calls: Sequence[Call]) -> Call:
        import cupy

        # Each replay writes to the memory that the captured calls allocated, so it must not be reused:
        # it comes from a pool that lives as long as the graph.
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            for call in calls:  # loads the kernels and fills the pool: neither can happen during a capture
                call()
            self._stream.synchronize()
            graph = self._capture(calls)

        def replay(graph: Any = graph, pool: Any = pool) -> None:
            graph.launch(self._stream)

        return replay

    def _capture(self, calls: Sequence[Call]) -> Any:
        self._stream.begin_capture()
        try:
            for call in calls:
                call()
        except BaseException:
            with suppress(Exception):  # the capture is invalid; report what caused it
                self._stream.end_capture()
            raise
        return self._stream.end_capture()
