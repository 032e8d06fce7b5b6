"""What the peers that are PyTorch extensions share. Only they import torch, and only when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BenchError
from ..recorders import Call


def load(directory: Path, file: str) -> Any:
    """Imports torch, loads one shared object of a peer's wheel and returns torch."""
    path = directory / file
    if not path.is_file():
        raise BenchError(
            f"--peers-dir: {path} is not there; unpack the peer's wheel and give the directory that holds {file}"
        )
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"{file} needs PyTorch, which cannot be imported here: {error}") from error
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BenchError(f"{path} does not load with torch {torch.__version__}: {error}") from error
    return torch


class TorchGraph:
    """Captures with torch, so that what the peer allocates stays in the graph's own pool; replays on our stream."""

    method = "cuda-graph"

    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.ExternalStream(stream.ptr)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.stream(self._stream):
            yield

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
