"""Launches in the host's form: argument blocks, loaded kernels, and a driver's duties, as a Protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.runtime.tensormap import TensorMapSpec

Dim3 = tuple[int, int, int]

_BLOCK_ALIGNMENT = 128
"""Alignment of every by-value kernel parameter in bytes: tensor maps need it."""


class ArgumentBlock:
    """One aligned allocation that holds every by-value parameter of a kernel.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each parameter, in the kernel's order.

    Attributes
    ----------
    views : tuple of memoryview
        `views[i]` is parameter i: write into it, then launch.
    pointers : int
        Address of the `void*[]` for the driver.

    Notes
    -----
    The driver copies the parameters before a launch returns, so a block can be written again at once. It must not be
    shared between threads: a launch drops the GIL while it reads the block.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        offsets = []
        total = 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        self._storage = ctypes.create_string_buffer(total + _BLOCK_ALIGNMENT)
        base = -(-ctypes.addressof(self._storage) // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        shift = base - ctypes.addressof(self._storage)
        whole = memoryview(self._storage).cast("B")
        self.views = tuple(
            whole[shift + offset : shift + offset + size] for offset, size in zip(offsets, sizes, strict=True)
        )
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*(base + offset for offset in offsets))
        self.pointers = ctypes.addressof(self._pointers)


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A loaded kernel on one device.

    `handle` is the driver's function; `owner` keeps it loaded; `context` is its context.
    """

    entry: str
    device: int
    handle: int
    context: int = 0
    owner: object = field(default=None, repr=False)


PreparedLaunch = Callable[[int], None]
"""Enqueues a launch on a stream."""


class Driver(Protocol):
    """Interface to a GPU for launchers. Streams are raw handles; 0 is the legacy default stream."""

    def wanted(self, request: BuildRequest) -> BuildRequest:
        """Choose the build of a kernel: all of `request`, or only its PTX."""

    def load(self, build: Build, device: int) -> LoadedKernel:
        """Load a kernel on a device, and allow the dynamic shared memory of its facts."""

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes of a tensor map."""

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        """Enqueue filling `nbytes` with a byte; the device of `stream` must be current (`device_guard`)."""

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        """A launch ready to be enqueued, again and again; `args` may change in between.

        `grid` counts blocks; `pdl` lets the kernel start before its predecessor in the stream has ended. Like `args`,
        it belongs to one thread.
        """

    def in_order(self, launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
        """Several prepared launches of one thread and device as one."""

    def is_capturing(self, stream: int) -> bool:
        """True if the stream is being captured into a graph."""

    def device_guard(self, device: int) -> AbstractContextManager[object]:
        """Make `device` current within a with statement."""


def one_by_one(launches: Sequence[PreparedLaunch]) -> PreparedLaunch:
    """Enqueue launches one by one: a plain `Driver.in_order`."""

    def enqueue(stream: int) -> None:
        for launch in launches:
            launch(stream)

    return enqueue
