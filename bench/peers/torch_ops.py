"""Code that the peers that are PyTorch extensions share. Only they import torch, and only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.device import Device
from ..core.errors import BenchError
from ..core.recorders import EVENTS, GRAPH, Call, Recorder


def import_torch(peer: str) -> Any:
    """PyTorch, or an error that says who needs it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise BenchError(f"{peer} needs PyTorch, which cannot be imported here: {error}") from error


def load(directory: Path, file: str) -> Any:
    """Imports torch, loads one shared object of a peer's wheel and returns torch."""
    path = directory / file
    if not path.is_file():
        raise BenchError(
            f"--peers-dir: {path} is not there; unpack the peer's wheel and give the directory that holds {file}"
        )
    torch = import_torch(file)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BenchError(f"{path} does not load with torch {torch.__version__}: {error}") from error
    return torch


def recorder_for(torch: Any, device: Device) -> Recorder:
    """The counterpart of `device.recorder()` for a PyTorch extension."""
    return {GRAPH: TorchGraph, EVENTS: TorchEager}[device.method](torch, device.stream)


def peak_bytes(torch: Any, call: Call, results: Callable[[], Sequence[Any]]) -> int:
    """Peak bytes of PyTorch's allocator during a call, minus bytes in use before and bytes of its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    own = sum(tensor.numel() * tensor.element_size() for tensor in results())
    return int(torch.cuda.max_memory_allocated() - before - own)


class TorchEager:
    """Makes the calls one by one on our stream."""

    method = EVENTS

    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.ExternalStream(stream.ptr)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.stream(self._stream):
            yield

    def record(self, calls: Sequence[Call]) -> Call:
        def replay() -> None:
            with self.current():
                for call in calls:
                    call()

        return replay


class TorchGraph(TorchEager):
    """Captures with torch, so that what the peer allocates stays in the graph's own pool; replays on our stream."""

    method = "cuda-graph"

    def record(self, calls: Sequence[Call]) -> Call:
        torch = self._torch
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay
