"""Address spaces: the generic layout, host arrays as global memory, shared and local memory with poison."""

from __future__ import annotations

import bisect

import numpy as np

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1.x
    from numpy import byte_bounds  # type: ignore[attr-defined, no-redef]

from ..errors import MemoryFault

_FIRST = 0x10001
GENERIC_BASE = {
    "global": 0,
    "const": _FIRST << 40,
    "param": (_FIRST + 1) << 40,
    "local": (_FIRST + 2) << 40,
    "shared": (_FIRST + 3) << 40,
}
"""Base of each state space in the generic address space (global addresses are below all of them)."""

FIRST_WINDOW = GENERIC_BASE["const"]
"""Addresses below this are global."""

_TOPS = {base >> 40: space for space, base in GENERIC_BASE.items() if base}
DEVICE_BASE = 1 << 48
"""Mapped arrays lie from here on, above every address of the host."""

BUFFER_SHIFT = 36
"""Mapped arrays are 2**36 bytes apart, views of one array aside, so that an address names its array."""

_ALIGNED = 16
"""Alignment of buffers in bytes, the width of the widest access: their typed views depend on it."""

_ALLOCATED = 256
"""Alignment of what is mapped first of each array, in bytes, as of an allocation on a device."""

_NEAR = 4096
"""An address this close behind a registered array is reported as out of that array's bounds."""

SHARED_RESERVED = 1024
"""Bytes at the bottom of every block's shared window that belong to the system."""

RANK_SHIFT = 24
"""A block's shared addresses hold its rank in the cluster from this bit on."""


def space_of(address: int) -> str:
    """Return the state space of a generic address."""
    return _TOPS.get(address >> 40, "global")


class Buffer:
    """A flat run of bytes with typed views."""

    def __init__(self, data: np.ndarray, base: int, name: str) -> None:
        self.base, self.name = base, name
        self.size = data.size
        self.writable = data.flags.writeable
        self.place(data)

    def place(self, data: np.ndarray) -> None:
        """Keep the content in these bytes from now on."""
        self.bytes = data
        self._views: dict[str, np.ndarray] = {"u1": data}

    def view(self, code: str) -> np.ndarray:
        """Return the bytes as an array of a NumPy type code (a tail shorter than one element is left out)."""
        array = self._views.get(code)
        if array is None:
            width = int(code[1:])
            array = self._views[code] = self.bytes[: self.size // width * width].view(code)
        return array


class _Window:
    """An array's place on the device: one buffer for each run of its bytes that is mapped, in ascending order."""

    def __init__(self, index: int, base: int, start: int, stop: int) -> None:
        self.index, self.base, self.start, self.stop = index, base, start, stop
        self.buffers: list[Buffer] = []
        self._mapped: dict[tuple, tuple[np.ndarray, int, str]] = {}

    def add(self, whole: np.ndarray, first: int, key: tuple, name: str) -> None:
        """Map some bytes of an array that begins at ``first`` on the host: a start, a stop, and whether to write."""
        self._mapped[key] = (whole, first, name)
        self._merge()

    def remove(self, key: tuple) -> None:
        """Take bytes back, but for those that others have mapped too."""
        del self._mapped[key]
        self._merge()

    def _merge(self) -> None:
        """Make the buffers again, those apart that do not change."""
        runs: list[list] = []
        for (start, stop, writable), (whole, first, name) in sorted(self._mapped.items(), key=lambda item: item[0]):
            low = start - (start - self.start) % _ALIGNED
            if runs and (low < runs[-1][1] or low == runs[-1][0]):
                runs[-1][1], runs[-1][2] = max(stop, runs[-1][1]), writable or runs[-1][2]
            else:
                runs.append([low, stop, writable, whole, first, name])
        before = {(each.base, each.size, each.writable): each for each in self.buffers}
        self.buffers = []
        for low, stop, writable, whole, first, name in runs:
            base = self.base + low - self.start
            buffer = before.get((base, stop - low, writable))
            if buffer is None:
                buffer = Buffer(whole[low - first : stop - first], base, name)
                buffer.writable = writable
            self.buffers.append(buffer)

    def find(self, address: int) -> Buffer | None:
        """Return the buffer that an address belongs to, or is behind."""
        if len(self.buffers) == 1 and address >= self.buffers[0].base:
            return self.buffers[0]
        at = bisect.bisect_right(self.buffers, address, key=lambda buffer: buffer.base)
        return self.buffers[at - 1] if at else None


class Memory:
    """Global memory: registers NumPy arrays and hands out device addresses.

    Examples
    --------
    >>> import numpy as np
    >>> memory = Memory()
    >>> address = memory.map(np.zeros(4, np.float32))
    >>> address == memory.map(np.zeros(4, np.float32))
    False
    """

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}
        self._starts: list[tuple[int, int]] = []  # where each window begins on the host, and its number; ascending
        self._known: dict[tuple, tuple[int, np.ndarray]] = {}
        self._free: list[int] = []
        self._host: list[tuple[int, Buffer]] = []
        self._grown: set[int] = set()

    def grow(self, size: int) -> int:
        """Return the address of ``size`` new bytes, zeros, as a kernel's ``malloc`` does."""
        address = self._allocated(size)
        self._grown.add(address)
        return address

    def shrink(self, address: int) -> bool:
        """Free what :meth:`grow` returned; False if it did not, or that is free already."""
        if address not in self._grown:
            return False
        self._grown.remove(address)
        self._freed(address)
        return True

    def _allocated(self, size: int) -> int:
        return self.map(np.zeros(max(size, 1), np.uint8), f"malloc of {size} bytes")

    def _freed(self, address: int) -> None:
        self.unmap(address)

    def store(self, name: str, data: np.ndarray) -> np.ndarray:
        """Return the array that a module's variable (all constants have the name '') lives in from now on."""
        return data

    def fresh(self) -> Memory:
        """Return the memory of a changed copy of a module."""
        return Memory()

    def map(self, array: np.ndarray, name: str = "") -> int:
        """Register an array and return its device address.

        Views of one array lie on the device as they do on the host, as far from each other, so that those that overlap
        here overlap there. Bytes that belong to none of them are out of bounds.

        Parameters
        ----------
        array : numpy.ndarray
            Any dtype. A non-contiguous view is mapped with the bytes between its first and last element.
        name : str, optional
            Shown in error messages.

        Returns
        -------
        int
            Device address; the same memory mapped twice gives the same address.
        """
        start, stop = byte_bounds(array) if array.size else (id(array), id(array))
        key = (start, stop, array.flags.writeable)
        if key in self._known:
            return self._known[key][0]
        whole, first = _owner(array, start, stop)
        window = self._window(first, first + whole.size, start)
        window.add(whole, first, key, name or f"array {window.index} {array.dtype}{list(array.shape)}")
        address = window.base + (start - window.start)
        self._known[key] = (address, array)
        return address

    def _window(self, start: int, stop: int, at: int) -> _Window:
        """Return the window that these bytes of the host lie in, or a new one where byte ``at`` is well aligned."""
        place = bisect.bisect_right(self._starts, (start, FIRST_WINDOW)) - 1
        if place >= 0 and start < stop <= self._windows[self._starts[place][1]].stop:
            return self._windows[self._starts[place][1]]
        index = self._free.pop() if self._free else len(self._windows) + 1
        base = DEVICE_BASE + (index << BUFFER_SHIFT)
        if base >= FIRST_WINDOW:
            raise MemoryFault("too many arrays are mapped")
        whole_units = (at - start) // _ALIGNED * _ALIGNED
        self._windows[index] = _Window(index, base + -whole_units % _ALLOCATED, start, stop)
        bisect.insort(self._starts, (start, index))
        return self._windows[index]

    def register(self, array: np.ndarray, name: str = "") -> int:
        """Make an array's bytes reachable at their own host address, and return it.

        For callers that already hold pointers: what a kernel's parameters carry may then be plain host addresses.
        Registered arrays must not overlap in part; one that lies inside another is found through the outer one. A view
        that does not start on 16 bytes is registered with the whole array that owns its memory.
        """
        start, stop = byte_bounds(array)
        wanted = start
        if start % 16:
            while isinstance(array.base, np.ndarray):
                array = array.base
            start, stop = byte_bounds(array)
            if start % 16:
                raise MemoryFault(f"an array at {start:#x} cannot be registered: it does not start on 16 bytes")
        covering = self.find(start)
        if covering is not None and stop <= covering.base + covering.size:
            return wanted
        buffer = Buffer(
            _flat(array, start, stop), start, name or f"array at {start:#x} {array.dtype}{list(array.shape)}"
        )
        self._host = [entry for entry in self._host if not (start <= entry[0] < stop)]
        bisect.insort(self._host, (start, buffer), key=lambda entry: entry[0])
        return wanted

    def unmap(self, address: int) -> None:
        """Forget the array mapped or registered at an address (the memory holds arrays alive)."""
        if address < DEVICE_BASE:
            kept = [entry for entry in self._host if entry[0] != address]
            if len(kept) == len(self._host):
                raise MemoryFault(f"no array is registered at {address:#x}")
            self._host = kept
            return
        keys = [key for key, value in self._known.items() if value[0] == address]
        if not keys:
            raise MemoryFault(f"no array is mapped at {address:#x}")
        window = self._windows[(address - DEVICE_BASE) >> BUFFER_SHIFT]
        for key in keys:
            del self._known[key]
            window.remove(key)
        if not window.buffers:
            del self._windows[window.index]
            self._starts.remove((window.start, window.index))
            self._free.append(window.index)

    def all_buffers(self) -> list[Buffer]:
        """Every array that is mapped or registered; they may overlap."""
        mapped = [buffer for window in self._windows.values() for buffer in window.buffers]
        return [*mapped, *(buffer for _, buffer in self._host)]

    def find(self, address: int) -> Buffer | None:
        """Return the buffer that an address belongs to (it may still be out of its bounds)."""
        if address >= DEVICE_BASE:
            window = self._windows.get((address - DEVICE_BASE) >> BUFFER_SHIFT)
            return window.find(address) if window else None
        place = bisect.bisect_right(self._host, address, key=lambda entry: entry[0]) - 1
        if place < 0:
            return None
        buffer = self._host[place][1]
        return buffer if address < buffer.base + buffer.size + _NEAR else None

    def slice(self, address: int, size: int, write: bool = False) -> np.ndarray:
        """Return bytes of global memory, checking bounds."""
        buffer = self.find(address)
        if buffer is None:
            raise MemoryFault(f"global address {address:#x} is in no array")
        offset = address - buffer.base
        if offset + size > buffer.size:
            raise MemoryFault(f"{size} bytes at byte {offset} of {buffer.name} ({buffer.size} bytes) are out of bounds")
        if write and not buffer.writable:
            raise MemoryFault(f"write to read-only {buffer.name}")
        return buffer.bytes[offset : offset + size]


def _owner(array: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, int]:
    """Return the bytes of the array that owns another's memory, or of that one itself, and where they begin."""
    root = _root(array)
    low, high = byte_bounds(root) if root.size else (start, start)
    if array.size and root.flags.c_contiguous and low <= start and stop <= high:
        return root.reshape(-1).view(np.uint8), low
    return _flat(array, start, stop), start


def _root(array: np.ndarray) -> np.ndarray:
    """Return the array that owns another's memory, with its axes in the order in which they lie there."""
    # What numpy.lib.stride_tricks.as_strided returns has an object as its base that is no array, but has one.
    base = array.base if isinstance(array.base, np.ndarray) else getattr(array.base, "base", None)
    if isinstance(base, np.ndarray):
        return _root(base)
    return array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))


def _flat(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return an array's bytes from its first to its last element."""
    if array.size == 0:
        return np.empty(0, np.uint8)
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8)
    return _window(array, start, stop)


def _window(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the bytes from a strided view's first to last element, backed by the same memory."""
    root = _root(array)
    root_start, root_stop = byte_bounds(root)
    if not root.flags.c_contiguous or not (root_start <= start and stop <= root_stop):
        raise MemoryFault("cannot map this strided array: its base is not contiguous")
    return root.reshape(-1).view(np.uint8)[start - root_start : stop - root_start]


class Shared:
    """Shared memory of one block: bytes and, per byte, 1 where the content is defined (0 is poison)."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = -(-size // 16) * 16
        self.base = (rank << RANK_SHIFT) + SHARED_RESERVED
        self.limit = size
        self.bytes = np.full(self.size, 0xCB, np.uint8)
        self.init = np.zeros(self.size, np.uint8)
        self._views = {"u1": self.bytes}
        self._inits = {w: self.init.view(f"u{w}") for w in (1, 2, 4, 8)}
        self.chunks = self.bytes.view("u4").reshape(-1, 4)
        self.chunk_init = self.init.view("u4").reshape(-1, 4)

    def view(self, code: str) -> np.ndarray:
        """Return the bytes as an array of a NumPy type code."""
        array = self._views.get(code)
        if array is None:
            array = self._views[code] = self.bytes.view(code)
        return array

    def init_view(self, width: int) -> np.ndarray:
        """Return the definedness bytes, ``width`` of them per element."""
        return self._inits[width]


INIT_ONES = {w: np.frombuffer(b"\1" * w, f"u{w}")[0] for w in (1, 2, 4, 8)}
"""The definedness value of a fully defined element of each width."""


class Local:
    """Local memory of one warp: ``size`` bytes per lane, with definedness."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // 16) * 16
        self.bytes = np.full(32 * self.size, 0xCB, np.uint8)
        self.init = np.zeros(32 * self.size, np.uint8)
        self.lane_base = np.arange(32, dtype="u8") * np.uint64(self.size)

    def view(self, code: str) -> np.ndarray:
        """Return the bytes of all lanes as an array of a NumPy type code."""
        return self.bytes.view(code)

    def init_view(self, width: int) -> np.ndarray:
        """Return the definedness bytes, ``width`` of them per element."""
        return self.init.view(f"u{width}")
