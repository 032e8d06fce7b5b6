"""The arrays of a cache, on the host or on a GPU: pools of pages, the block table, and what a step uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mla_cupy import ops, reference
from mla_cupy.arrays import cupy_family, stream_handle
from mla_cupy.arrays.staging import Staging
from mla_cupy.cache.upload import Sheet, Words
from mla_cupy.cache_formats import CacheFormat
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.ops import backend
from mla_cupy.ops.cache_pages import UPDATE_OPERATION
from mla_cupy.ops.call import Invocation, fixed
from mla_cupy.ops.checks import is_integer
from mla_cupy.runtime import device as devices

Array = npt.NDArray[Any]


class Memory(Protocol):
    """Memory that `PagedKVCache` lies in: the host's or a GPU's.

    Attributes
    ----------
    table, seqlens : array
        The block table and the lengths of all sequences.
    step_table, step_seqlens : array
        Those of the latest step, with a row for each sequence that the cache can hold.
    step_slots, step_positions : array
        Of the latest step's tokens, with room for as many as a step can have.
    pools : mapping
        Name -> array of bytes, (num_layers, num_pages, page_bytes).
    """

    table: Any
    seqlens: Any
    step_table: Any
    step_seqlens: Any
    step_slots: Any
    step_positions: Any
    pools: Mapping[str, Any]

    def staging(self) -> Sheet:
        """Host memory to write the next step to."""

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Upload a part of the words just written, bring the tables up to date, and copy pages."""

    def view(self, pool: Any, record: CacheFormat, layer: int, page_size: int) -> Any:
        """A layer of a pool as an array of the record's dtype, (num_pages, page_size, width)."""

    def fetch(self) -> tuple[Array, Array]:
        """The block table and the lengths of all sequences on the host, once all work on the device is done."""


def page_stride(record: CacheFormat, page_size: int) -> int:
    """Bytes from one page of a pool to the next."""
    return -(-record.page_bytes(page_size) // 16) * 16


class HostMemory:
    """NumPy arrays. What changes them is the oracle, or, for tests, the operations in the simulator."""

    def __init__(
        self,
        at: Words,
        pools: Mapping[str, tuple[int, int, int]],
        shape: tuple[int, int, int],
        page_size: int,
        run: ModuleType = reference,
    ) -> None:
        self._at, self._page_size, self._run = at, page_size, run
        self.words = np.zeros(at.total, np.int32)
        self._sheet = at.sheet(self.words)
        max_seqs, max_pages, max_tokens = shape
        self.table, self.step_table = np.zeros((2, max_seqs, max_pages), np.int32)
        self.seqlens, self.step_seqlens = np.zeros((2, max_seqs), np.int32)
        self.step_slots, self.step_positions = np.zeros((2, max_tokens), np.int32)
        self.pools: Mapping[str, Any] = {name: np.zeros(size, np.uint8) for name, size in pools.items()}

    def staging(self) -> Sheet:
        """The words themselves."""
        return self._sheet

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Copy at once."""
        arrays = (self.words[self._at.header :], self.table, self.seqlens, self.step_table, self.step_seqlens)
        self._run.cache_update(*arrays, self.step_slots, self.step_positions, page_size=self._page_size)
        if copies:
            pairs = self.words[: 2 * self._at.max_seqs].reshape(-1, 2)
            for pool in self.pools.values():
                self._run.cache_copy_pages(pool, pairs)

    def view(self, pool: Any, record: CacheFormat, layer: int, page_size: int) -> Array:
        """See `Memory`."""
        dtype = numpy_dtype(record.dtype)
        strides = (pool.strides[1], record.token_bytes, dtype.itemsize)
        shape = (pool.shape[1], page_size, record.width)
        made: Array = np.ndarray(shape, dtype, pool[layer].data, 0, strides)
        return made

    def fetch(self) -> tuple[Array, Array]:
        """The arrays themselves."""
        return self.table, self.seqlens


class DeviceMemory:
    """CuPy arrays. A step is one copy from pinned memory and one launch; copies of pages are one more per pool."""

    def __init__(
        self,
        at: Words,
        pools: Mapping[str, tuple[int, int, int]],
        shape: tuple[int, int, int],
        page_size: int,
        device: int,
    ) -> None:
        self._at, self._page_size, self._device = at, page_size, device
        self._family = family = cupy_family()
        stream = family.current_stream(device)
        max_seqs, max_pages, max_tokens = shape

        def zeros(shape: tuple[int, ...], dtype: str = "int32") -> Any:
            made = family.empty(shape, dtype, device, stream)
            made.fill(0)
            return made

        self.words = zeros((at.total,))
        self.table, self.step_table = (zeros((max_seqs, max_pages)) for _ in range(2))
        self.seqlens, self.step_seqlens = (zeros((max_seqs,)) for _ in range(2))
        self.step_slots, self.step_positions = (zeros((max_tokens,)) for _ in range(2))
        self.pools: Mapping[str, Any] = {name: zeros(size, "uint8") for name, size in pools.items()}
        self._staging = Staging(at.total, device)
        self._sheets = [at.sheet(words) for words in self._staging.buffers]
        self._address = family.address(self.words)
        self._update: Callable[[int], None] | None = None  # enqueues `cache_update`
        self._pairs = self.words[: 2 * at.max_seqs].reshape(-1, 2)

    def staging(self) -> Sheet:
        """Pinned memory that no copy in flight reads."""
        return self._sheets[self._staging.acquire()]

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Enqueue; nothing waits."""
        handle = self._family.current_stream(self._device) if stream is None else stream_handle(stream)
        if self._update is None:
            self._update = self._fixed(handle)
        self._staging.copy_to(self._address, part, handle)
        self._update(handle)
        if copies:
            for pool in self.pools.values():
                ops.cache_copy_pages(pool, self._pairs, stream=handle)

    def _fixed(self, stream: int) -> Callable[[int], None]:
        call = Invocation.of(
            UPDATE_OPERATION,
            packed=self.words[self._at.header :],
            table=self.table,
            seqlens=self.seqlens,
            step_table=self.step_table,
            step_seqlens=self.step_seqlens,
            slots=self.step_slots,
            positions=self.step_positions,
            page_size=self._page_size,
            stream=stream,
        )
        return fixed(call, self._family.native)

    def view(self, pool: Any, record: CacheFormat, layer: int, page_size: int) -> Any:
        """See `Memory`."""
        strides = (pool.strides[1], record.token_bytes, numpy_dtype(record.dtype).itemsize)
        shape = (pool.shape[1], page_size, record.width)
        return self._family.view_as(pool[layer], shape, record.dtype, strides)

    def fetch(self) -> tuple[Array, Array]:
        """Copies; this waits."""
        self._family.synchronize(self._device)
        stream = self._family.current_stream(self._device)
        return self._family.to_numpy(self.table, stream), self._family.to_numpy(self.seqlens, stream)


def memory_on(
    device: Any,
    host: type[HostMemory],
    words: Words,
    pools: Mapping[str, tuple[int, int, int]],
    shape: tuple[int, int, int],
    page_size: int,
) -> Memory:
    """Memory of a device: "cpu", a GPU, or None, the current GPU if there is one.

    Raises
    ------
    ArgumentError
        If it is nothing of the kind.
    UnsupportedDeviceError
        If there is no such GPU.
    """
    if device is None:
        device = cupy_family().current_device() if backend.use_gpu() else "cpu"
    if isinstance(device, str) and device == "cpu":
        return host(words, pools, shape, page_size)
    if not is_integer(device) or device < 0:
        raise ArgumentError(explain("device", repr(device), 'a CUDA ordinal, "cpu" or None'))
    return DeviceMemory(words, pools, shape, page_size, devices.describe(int(device)).ordinal)
