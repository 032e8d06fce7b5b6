"""The host in place of a GPU: NumPy arrays, which the simulator takes as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from .recorders import GRAPH, Eager

Array = npt.NDArray[Any]


class WallClock:
    """Time on the host."""

    def __init__(self) -> None:
        self._begin = 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop_us(self) -> float:
        return (time.perf_counter() - self._begin) * 1e6


class HostDevice:
    """`Device` in NumPy."""

    name, arch, l2_bytes, stream, method = "host", "sm_0", 1000, None, GRAPH

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def recorder(self) -> Eager:
        return Eager()

    def clock(self) -> Any:
        return WallClock()

    def synchronize(self) -> None:
        """Nothing is queued."""

    def release(self) -> None:
        """Nothing is kept."""

    def normal(self, shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0, mean: float = 0.0) -> Array:
        values: Array = (mean + scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.dtype(dtype))
        return values

    def upload(self, array: Array) -> Array:
        return np.array(array)

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        made: Array = np.empty(shape, np.dtype(dtype))
        self.poison(made)
        return made

    def poison(self, array: Array) -> None:
        bits = np.dtype(f"uint{8 * array.itemsize}")
        array.view(bits)[...] = np.iinfo(bits).max

    def to_host(self, array: Array) -> Array:
        return np.array(array)

    def take(self, array: Array, rows: npt.NDArray[np.integer[Any]]) -> Array:
        taken: Array = array[rows]
        return taken

    def allocated_by(self, call: Callable[[], object]) -> int:
        call()
        return 0

    def launch_empty(self) -> None:
        """There is nothing to launch on."""

    def count_not_finite(self, array: Array) -> int:
        return int((~np.isfinite(array.astype(np.float32))).sum())
