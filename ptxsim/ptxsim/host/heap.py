"""Memory that the host program and the simulator share, at the same addresses in both processes."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import numpy as np

from ..errors import SimError
from ..memory.spaces import Memory

BASE = 0x200000000000
"""Address of the heap in every process."""

SIZE = 1 << 36
"""Bytes of the heap; pages exist once they are touched."""

_ALIGN = 512
_GAP = 4096
"""Unused bytes after each allocation, so that an access beyond it does not hit the next one."""

_READ_WRITE, _SHARED, _FIXED_NOREPLACE, _REMOVE = 3, 1, 0x100000, 9


class Heap:
    """Address space for allocations, backed by an anonymous file that another process can map.

    Attributes
    ----------
    path : str
        How another process of the same user opens the file.
    live : dict of int to (int, int)
        Size and kind of each allocation, by address.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("ptxsim", os.MFD_CLOEXEC)
        os.ftruncate(self.file, SIZE)
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (*(ctypes.c_size_t,) * 2, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
        self._libc = libc
        place = libc.mmap(BASE, SIZE, _READ_WRITE, _SHARED | _FIXED_NOREPLACE, self.file, 0)
        if place != BASE:
            raise SimError(f"the memory of host programs cannot be mapped ({os.strerror(ctypes.get_errno())})")
        self.live: dict[int, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = [(BASE, SIZE)]

    def clear(self) -> None:
        """Free all allocations."""
        for address in [*self.live]:
            self.free(address)

    @property
    def used(self) -> int:
        """Bytes of all allocations."""
        return sum(size for size, _ in self.live.values())

    def allocate(self, size: int, kind: int) -> int:
        """Return the address of new memory, or 0."""
        span = -(-max(size, 1) // _ALIGN) * _ALIGN + _GAP
        for place, (start, room) in enumerate(self._free):
            if room >= span:
                self._free[place] = (start + span, room - span)
                self.live[start] = (size, kind)
                return start
        return 0

    def free(self, address: int) -> bool:
        """Free an allocation and give its pages back; False if there is none at the address."""
        if address not in self.live:
            return False
        size, _ = self.live.pop(address)
        span = -(-max(size, 1) // _ALIGN) * _ALIGN + _GAP
        first, last = -(-address // 4096) * 4096, (address + span) // 4096 * 4096
        if last > first:
            self._libc.madvise(first, last - first, _REMOVE)
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (address, span)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = [each for each in merged if each[1]]
        return True

    def find(self, address: int) -> int | None:
        """Return the start of the allocation that an address lies in."""
        start = max((each for each in self.live if each <= address), default=None)
        return start if start is not None and address < start + max(self.live[start][0], 1) else None

    def array(self, address: int, size: int) -> np.ndarray:
        """Return bytes of the heap."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@cache
def shared_heap() -> Heap:
    """Return the heap of this process; there is one, since its addresses are fixed."""
    return Heap()


class HeapMemory(Memory):
    """Global memory whose arrays all lie in a heap, module variables included."""

    def __init__(self, heap: Heap) -> None:
        super().__init__()
        self.heap = heap

    def store(self, name: str, data: np.ndarray) -> np.ndarray:
        """Move a module's variable into the heap."""
        address = self.heap.allocate(data.size, 2)
        array = self.heap.array(address, data.size)
        array[:] = data
        return array

    def map(self, array: np.ndarray, name: str = "") -> int:
        """Register an array of the heap at its own address."""
        return self.register(array, name)

    def _allocated(self, size: int) -> int:
        return self.allocate(max(size, 1), 2)

    def _freed(self, address: int) -> None:
        self.free(address)

    def allocate(self, size: int, kind: int) -> int:
        """Allocate memory that kernels can reach; 0 if there is none left."""
        address = self.heap.allocate(size, kind)
        if address and size:
            self.register(self.heap.array(address, size), f"allocation of {size} bytes at {address:#x}")
        return address

    def free(self, address: int) -> bool:
        """Free memory from :meth:`allocate`."""
        size = self.heap.live.get(address, (0, 0))[0]
        if not self.heap.free(address):
            return False
        if size:
            self.unmap(address)
        return True
