"""The arrays of a cache, on the host or on a GPU: pools of pages, the block table, and a step's upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mla_cupy import ops, reference
from mla_cupy.arrays import CupyFamily, stream_handle
from mla_cupy.arrays.staging import Staging
from mla_cupy.arrays.torch import TORCH_CPU, TorchFamily
from mla_cupy.cache.upload import Sheet, Words
from mla_cupy.cache_formats import PAGE_ALIGNMENT, CacheFormat
from mla_cupy.dtypes import numpy_dtype
from mla_cupy.ops.cache_pages import UPDATE_OPERATION
from mla_cupy.ops.call import Invocation, fixed

Array = npt.NDArray[Any]


class Layout(NamedTuple):
    """Sizes of a cache.

    Attributes
    ----------
    words : Words
        The words of a step's upload.
    formats : mapping
        Name of a pool -> its record.
    max_tokens : int
        Of a step.
    """

    words: Words
    formats: Mapping[str, CacheFormat]
    num_layers: int
    num_pages: int
    page_size: int
    max_seqs: int
    max_pages: int
    max_tokens: int

    def tables(self) -> Sequence[tuple[int, ...]]:
        """Shapes of `Tables`."""
        both = (self.max_seqs, self.max_pages), (self.max_seqs,)
        return *both, *both, (self.max_tokens,), (self.max_tokens,)

    def pools(self) -> Mapping[str, tuple[int, int, int]]:
        """Shapes of the pools in bytes: layers, pages, and the bytes of a page."""
        return {
            name: (self.num_layers, self.num_pages, page_stride(record, self.page_size))
            for name, record in self.formats.items()
        }

    def view_of(self, pool: str) -> tuple[tuple[int, int, int], str, tuple[int, int, int]]:
        """Shape, dtype and strides in bytes of a layer, (num_pages, page_size, width)."""
        record = self.formats[pool]
        strides = page_stride(record, self.page_size), record.token_bytes, numpy_dtype(record.dtype).itemsize
        return (self.num_pages, self.page_size, record.width), record.dtype, strides


class Tables(NamedTuple):
    """Arrays that a step changes, int32; see `PagedKVCache` and `CacheStep`. A step's arrays have room for any step."""

    table: Any
    seqlens: Any
    step_table: Any
    step_seqlens: Any
    step_slots: Any
    step_positions: Any

    def of_step(self, b: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Views, in the order of `CacheStep`."""
        return self.step_slots[:tokens], self.step_positions[:tokens], self.step_table[:b], self.step_seqlens[:b]


class Memory(Protocol):
    """Memory of a `PagedKVCache`, as arrays of one library.

    Attributes
    ----------
    pools : mapping
        Name -> the pages of all layers.
    """

    pools: Mapping[str, Any]

    @property
    def tables(self) -> Tables:
        """The arrays after the latest step."""

    @property
    def in_place(self) -> bool:
        """True if a step overwrites the arrays of the one before, and False if it makes new ones."""

    def step(self, b: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Slots, positions, block table and lengths of the latest step, of `b` sequences and `tokens` tokens."""

    def staging(self) -> Sheet:
        """Host memory to write the next step to."""

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Upload a part of the words just written, bring the tables up to date, and copy pages."""

    def layer(self, pool: str, layer: int) -> Any:
        """A layer of a pool as an array of the record's dtype, (num_pages, page_size, width)."""

    def write(self, operation: str, arrays: Sequence[Any], pool: str, layer: int, *more: Any, **options: Any) -> None:
        """Call an operation that writes to a layer, its argument after `arrays`."""

    def lend(self, x: Array) -> Any:
        """An array of the host as one of the library's."""

    def fetch(self) -> tuple[Array, Array]:
        """The block table and the lengths of all sequences on the host, once all work on the device is done."""


def page_stride(record: CacheFormat, page_size: int) -> int:
    """Bytes from one page of a pool to the next."""
    return -(-record.page_bytes(page_size) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class HostMemory:
    """NumPy arrays. The oracle changes them, or, for tests, the operations in the simulator."""

    in_place = True

    def __init__(self, layout: Layout, run: ModuleType = reference) -> None:
        self._layout, self._run = layout, run
        self.words = np.zeros(layout.words.total, np.int32)
        self._sheet = layout.words.sheet(self.words)
        self._tables = Tables(*(np.zeros(shape, np.int32) for shape in layout.tables()))
        self.pools: Mapping[str, Any] = self._make_pools()

    def _make_pools(self) -> Mapping[str, Any]:
        return {name: np.zeros(shape, np.uint8) for name, shape in self._layout.pools().items()}

    @property
    def tables(self) -> Tables:
        """See `Memory`."""
        return self._tables

    def step(self, b: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Views of the tables."""
        return self.tables.of_step(b, tokens)

    def staging(self) -> Sheet:
        """The words themselves."""
        return self._sheet

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Copy at once."""
        layout = self._layout
        self._run.cache_update(self.words[layout.words.header :], *self._tables, page_size=layout.page_size)
        if copies:
            self._copy_pages(self.words[: 2 * layout.max_seqs].reshape(-1, 2))

    def _copy_pages(self, pairs: Array) -> None:
        for pool in self.pools.values():
            self._run.cache_copy_pages(pool, pairs)

    def layer(self, pool: str, layer: int) -> Any:
        """See `Memory`."""
        shape, dtype, strides = self._layout.view_of(pool)
        return np.ndarray(shape, numpy_dtype(dtype), self.pools[pool][layer].data, 0, strides)

    def write(self, operation: str, arrays: Sequence[Any], pool: str, layer: int, *more: Any, **options: Any) -> None:
        """See `Memory`."""
        getattr(ops, operation)(*arrays, self.layer(pool, layer), *more, **options)

    def lend(self, x: Array) -> Any:
        """The array itself."""
        return x

    def fetch(self) -> tuple[Array, Array]:
        """The arrays themselves."""
        return self._tables.table, self._tables.seqlens


class TorchHostMemory(HostMemory):
    """PyTorch tensors on the CPU, over the memory of NumPy arrays."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._lent = Tables(*map(self.lend, self._tables))
        self._bytes = {name: self.lend(pool) for name, pool in self.pools.items()}

    @property
    def tables(self) -> Tables:
        """See `Memory`."""
        return self._lent

    def submit(self, part: slice, copies: int, stream: Any) -> None:
        """Copy at once, and tell autograd."""
        super().submit(part, copies, stream)
        assert TORCH_CPU.count_writes is not None
        TORCH_CPU.count_writes([*self._lent, *(self._bytes.values() if copies else ())])

    def layer(self, pool: str, layer: int) -> Any:
        """A view of one tensor for all calls, so that autograd sees every write."""
        return TORCH_CPU.view_as(self._bytes[pool][layer], *self._layout.view_of(pool))

    def lend(self, x: Array) -> Any:
        """Tensor over the same memory."""
        return TORCH_CPU.release(x)


class DeviceMemory:
    """Arrays of CuPy or PyTorch on a GPU.

    A step is one copy from pinned memory and one launch; copies of pages are one more per pool.
    """

    in_place = True

    def __init__(self, layout: Layout, family: CupyFamily | TorchFamily, device: int) -> None:
        self._layout, self._family, self._device = layout, family, device
        stream, words = family.current_stream(device), layout.words

        def zeros(shape: tuple[int, ...], dtype: str = "int32") -> Any:
            made = family.empty(shape, dtype, device, stream)
            made[...] = 0
            return made

        with family.on_device(device):
            self.words = zeros((words.total,))
            self.tables = Tables(*map(zeros, layout.tables()))
            self.pools: Mapping[str, Any] = {name: zeros(shape, "uint8") for name, shape in layout.pools().items()}
        self._staging = Staging(words.total, device)
        self._sheets = [words.sheet(buffer) for buffer in self._staging.buffers]
        self._address = family.address(self.words)
        self._update: Callable[[int], None] | None = None  # enqueues `cache_update`
        self._pairs = self.words[: 2 * layout.max_seqs].reshape(-1, 2)

    def step(self, b: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        """Views of the tables."""
        return self.tables.of_step(b, tokens)

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
        if self._family.count_writes is not None:
            self._family.count_writes(self.tables)
        if copies:
            for pool in self.pools.values():
                ops.cache_copy_pages(pool, self._pairs, stream=handle)

    def _fixed(self, stream: int) -> Callable[[int], None]:
        packed, tables = self.words[self._layout.words.header :], self.tables
        call = Invocation.of(
            UPDATE_OPERATION,
            packed=packed,
            table=tables.table,
            seqlens=tables.seqlens,
            step_table=tables.step_table,
            step_seqlens=tables.step_seqlens,
            slots=tables.step_slots,
            positions=tables.step_positions,
            page_size=self._layout.page_size,
            stream=stream,
        )
        return fixed(call, self._family.native)

    def layer(self, pool: str, layer: int) -> Any:
        """See `Memory`."""
        return self._family.view_as(self.pools[pool][layer], *self._layout.view_of(pool))

    def write(self, operation: str, arrays: Sequence[Any], pool: str, layer: int, *more: Any, **options: Any) -> None:
        """See `Memory`."""
        getattr(ops, operation)(*arrays, self.layer(pool, layer), *more, **options)

    def lend(self, x: Array) -> Any:
        """A tensor on the CPU; a NumPy array for CuPy."""
        return TORCH_CPU.release(x) if isinstance(self._family, TorchFamily) else x

    def fetch(self) -> tuple[Array, Array]:
        """Copies; this waits."""
        self._family.synchronize(self._device)
        stream = self._family.current_stream(self._device)
        return self._family.to_numpy(self.tables.table, stream), self._family.to_numpy(self.tables.seqlens, stream)
