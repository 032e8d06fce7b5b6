"""Small uploads from pinned memory: several in flight, none waited for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BUFFERS = 4


class Staging:
    """Pinned buffers of 32-bit words that are used in turn.

    Parameters
    ----------
    words : int
    device : int
        CUDA ordinal.

    Attributes
    ----------
    buffers : list of array, (words,), int32
    """

    def __init__(self, words: int, device: int) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        self._copy, self._kind, self._record = runtime.memcpyAsync, runtime.memcpyHostToDevice, runtime.eventRecord
        self._pinned = [cupy.cuda.alloc_pinned_memory(4 * words) for _ in range(_BUFFERS)]
        self._addresses = [memory.ptr for memory in self._pinned]
        self.buffers: list[npt.NDArray[np.int32]] = [np.frombuffer(memory, np.int32, words) for memory in self._pinned]
        with cupy.cuda.Device(device):
            self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self._next = 0

    def acquire(self) -> int:
        """The index of the next buffer; waits only if a copy from every buffer is still in flight."""
        self._next = (self._next + 1) % _BUFFERS
        self._events[self._next].synchronize()
        return self._next

    def copy_to(self, target: int, part: slice, stream: int) -> None:
        """Enqueue a copy of a part of the buffer to the same part of the device array at address `target`."""
        begin = 4 * part.start
        source, nbytes = self._addresses[self._next] + begin, 4 * (part.stop - part.start)
        self._copy(target + begin, source, nbytes, self._kind, stream)
        self._record(self._events[self._next].ptr, stream)
