"""The arrays of a cache, on the host or on a GPU: pools of pages, the block table, and what a step uploads."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mla_cupy import ops, reference
from mla_cupy.arrays import cupy_family
from mla_cupy.arrays.staging import Staging
from mla_cupy.cache.upload import Words
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.records import Record

Array = npt.NDArray[Any]
_ALIGNMENT = 256


class Memory(Protocol):
    """What `PagedKVCache` asks of a place.

    Attributes
    ----------
    words : array, (total,), int32
        The latest upload; `step_table`, `step_seqlens`: the block table and the lengths of the latest step, both with a
        row for each sequence that the cache can hold; `table`, `seqlens`: those of all sequences.
    pools : mapping
        Name -> array of bytes, (num_layers, num_pages, page_bytes).
    """

    words: Any
    table: Any
    seqlens: Any
    step_table: Any
    step_seqlens: Any
    pools: Mapping[str, Any]

    def staging(self) -> Array:
        """Words to write the next step to, on the host."""

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Upload a part of the words just written, bring the tables up to date, and copy pages."""

    def view(self, pool: Any, record: Record, layer: int, page_size: int) -> Any:
        """A layer of a pool as an array of the record's dtype, (num_pages, page_size, width)."""


def page_stride(record: Record, page_size: int) -> int:
    """From one page of a pool to the next, in bytes."""
    return -(-record.page_bytes(page_size) // 16) * 16


class HostMemory:
    """NumPy arrays. What changes them is the oracle, or, for tests, the operations in the simulator."""

    def __init__(
        self,
        at: Words,
        pools: Mapping[str, tuple[int, int, int]],
        shape: tuple[int, int],
        page_size: int,
        run: ModuleType = reference,
    ) -> None:
        self._at, self._page_size, self._run = at, page_size, run
        self.words = np.zeros(at.total, np.int32)
        self.table, self.step_table = np.zeros((2, *shape), np.int32)
        self.seqlens, self.step_seqlens = np.zeros((2, shape[0]), np.int32)
        self.pools: Mapping[str, Any] = {name: np.zeros(size, np.uint8) for name, size in pools.items()}

    def staging(self) -> Array:
        """The words themselves."""
        return self.words

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """At once."""
        arrays = (self.words[self._at.header :], self.table, self.seqlens, self.step_table, self.step_seqlens)
        self._run.cache_update(*arrays, page_size=self._page_size)
        if copies:
            pairs = self.words[self._at.pairs : self._at.pairs + 2 * self._at.max_seqs].reshape(-1, 2)
            for pool in self.pools.values():
                self._run.cache_copy_pages(pool, pairs)

    def view(self, pool: Any, record: Record, layer: int, page_size: int) -> Array:
        """See `Memory`."""
        dtype = numpy_dtype(record.dtype)
        strides = (pool.strides[1], record.token_bytes, dtype.itemsize)
        shape = (pool.shape[1], page_size, record.width)
        made: Array = np.ndarray(shape, dtype, pool[layer].data, 0, strides)
        return made


class DeviceMemory:
    """CuPy arrays. A step is one copy from pinned memory and one launch; copies of pages are one more per pool."""

    def __init__(
        self,
        at: Words,
        pools: Mapping[str, tuple[int, int, int]],
        shape: tuple[int, int],
        page_size: int,
        device: int,
    ) -> None:
        self._at, self._page_size, self._device = at, page_size, device
        self._family = family = cupy_family()
        stream = family.current_stream(device)
        self.words = family.empty((at.total,), "int32", device, stream)
        self.table, self.step_table = (family.empty(shape, "int32", device, stream) for _ in range(2))
        self.seqlens, self.step_seqlens = (family.empty(shape[:1], "int32", device, stream) for _ in range(2))
        made = {name: family.empty(size, "uint8", device, stream) for name, size in pools.items()}
        self.pools: Mapping[str, Any] = made
        for array in (self.words, self.table, self.step_table, self.seqlens, self.step_seqlens, *self.pools.values()):
            array.fill(0)
        self._staging = Staging(at.total, device)
        self._update = (self.words[at.header :], self.table, self.seqlens, self.step_table, self.step_seqlens)
        self._pairs = self.words[at.pairs : at.pairs + 2 * at.max_seqs].reshape(-1, 2)

    def staging(self) -> Array:
        """Pinned memory that no copy in flight reads."""
        words: Array = self._staging.acquire()
        return words

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Enqueue; nothing waits."""
        self._staging.copy_to(self.words, part, stream)
        ops.cache_update(*self._update, page_size=self._page_size, stream=stream)
        if copies:
            for pool in self.pools.values():
                ops.cache_copy_pages(pool, self._pairs, stream=stream)

    def view(self, pool: Any, record: Record, layer: int, page_size: int) -> Any:
        """See `Memory`."""
        strides = (pool.strides[1], record.token_bytes, numpy_dtype(record.dtype).itemsize)
        shape = (pool.shape[1], page_size, record.width)
        return self._family.view_as(pool[layer], shape, record.dtype, strides)
