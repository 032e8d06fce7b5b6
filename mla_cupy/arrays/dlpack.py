"""Arrays that are reached through DLPack: JAX's, and any other library's on a GPU."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mla_cupy.arrays.cupy import cupy_family
from mla_cupy.arrays.numpy import NUMPY
from mla_cupy.arrays.view import Family, Native

CUDA_DEVICE_TYPE = 2
"""`kDLCUDA`."""


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """True if all work before it is done."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class InFlight:
    """Arrays that kernels may still read or write; thread-safe."""

    def __init__(self) -> None:
        self._held: deque[tuple[Event, tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()

    def hold(self, event: Event, arrays: Iterable[Any]) -> None:
        """Keep arrays until `event` is done and the next call comes, and drop those whose own event is done."""
        with self._lock:
            finished = []
            while self._held and self._held[0][0].done:
                finished.append(self._held.popleft())
            self._held.append((event, tuple(arrays)))
        finished.clear()  # outside of the lock: what frees an array is another library's code

    def drain(self) -> None:
        """Wait for everything, and keep nothing."""
        with self._lock:
            held, self._held = self._held, deque()
        for event, _ in held:
            event.synchronize()


class JaxFamily:
    """JAX arrays, through DLPack, which also orders the streams. They cannot be written to."""

    name, mutable, takes_stream, count_writes = "jax", False, False, None

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    @property
    def native(self) -> Native:
        return cupy_family() if self.on_gpu else NUMPY

    def adopt(self, x: Any) -> Any:
        return cupy_family().from_dlpack(x) if self.on_gpu else np.asarray(x)

    def release(self, x: Any) -> Any:
        import jax

        return jax.dlpack.from_dlpack(x) if self.on_gpu else jax.device_put(x, jax.devices("cpu")[0])

    def settle(self, lent: Iterable[Any]) -> None:
        """Make JAX's own stream wait: JAX gives the memory of dropped arrays to later work on it, which nothing else
        orders after ours. Holding the arrays instead would keep them from being donated.
        """
        if not self.on_gpu:
            return
        import jax

        cupy, device = cupy_family(), _device_of(lent)
        token = cupy.empty((1,), "int32", device, cupy.current_stream(device))
        with cupy.on_device(device):
            jax.numpy.negative(jax.dlpack.from_dlpack(token))  # runs on that stream once ours has come here


class DlpackFamily:
    """GPU arrays of any other library with DLPack: results are CuPy arrays."""

    name, on_gpu, mutable, takes_stream, count_writes = "dlpack", True, True, False, None

    @property
    def native(self) -> Native:
        return cupy_family()

    def adopt(self, x: Any) -> Any:
        return cupy_family().from_dlpack(x)

    def release(self, x: Any) -> Any:
        return x

    def settle(self, lent: Iterable[Any]) -> None:
        """Hold them: an unknown library may reuse the memory of a dropped array at once."""
        held = tuple(x for x in lent if x is not None)
        event = cupy_family().event(_device_of(held))
        if event is not None:
            _IN_FLIGHT.hold(event, held)


def _device_of(lent: Iterable[Any]) -> int:
    return next(int(x.device.id) for x in lent if x is not None)


_IN_FLIGHT = InFlight()
atexit.register(_IN_FLIGHT.drain)

JAX: dict[bool, Family] = {on_gpu: JaxFamily(on_gpu) for on_gpu in (False, True)}
DLPACK: Family = DlpackFamily()
