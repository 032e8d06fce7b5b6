"""Small uploads from pinned memory: several in flight, none waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.arrays import stream_handle
from mla_cupy.arrays.cupy import cupy_family

_BUFFERS = 4


class Staging:
    """Pinned buffers of 32-bit words that are used in turn.

    Parameters
    ----------
    words : int
    device : int
        CUDA ordinal.
    """

    def __init__(self, words: int, device: int) -> None:
        import cupy

        self._cupy, self._device = cupy, device
        self._pinned = [cupy.cuda.alloc_pinned_memory(4 * words) for _ in range(_BUFFERS)]
        self._views = [np.frombuffer(memory, np.int32, words) for memory in self._pinned]
        with cupy.cuda.Device(device):
            self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self._next = 0

    def acquire(self) -> npt.NDArray[np.int32]:
        """The next buffer; waits only if as many copies as there are buffers are still in flight."""
        self._next = (self._next + 1) % _BUFFERS
        self._events[self._next].synchronize()
        return self._views[self._next]

    def copy_to(self, target: Any, part: slice, stream: Any) -> None:
        """Enqueue a copy of a part of the buffer to the same part of an array on the device."""
        family, begin = cupy_family(), 4 * part.start
        handle = family.current_stream(self._device) if stream is None else stream_handle(stream)
        source = self._pinned[self._next].ptr + begin
        nbytes = 4 * (part.stop - part.start)
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(target.data.ptr + begin, source, nbytes, runtime.memcpyHostToDevice, handle)
        runtime.eventRecord(self._events[self._next].ptr, handle)
