"""Interface to array libraries: borrowed views, memory, streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ShapeError, explain

HOST = -1
"""The `device` of a view in the host's memory."""
ARRAY_ALIGNMENT = 16
"""Signatures distinguish addresses modulo this number of bytes, TMA's alignment."""

Signature = tuple[Any, ...]
"""Everything about some arrays but their addresses, in a form that can be hashed and compared quickly."""

Matcher = Callable[[Sequence[Any]], "list[int] | None"]
"""Tests if arrays have a given signature; returns their addresses, as from `Native.signature`, or None."""

Counter = Callable[[Collection[Any]], None]
"""Counts a write to each of some arrays, for a library that would not notice it otherwise."""


class View(NamedTuple):
    """An array seen from outside. `strides` are in elements; `device` is a CUDA ordinal, or HOST."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int

    def span(self, itemsize: int) -> tuple[int, int]:
        """The first and the last byte (exclusive) of its elements, relative to `ptr`; (0, 0) without elements."""
        if 0 in self.shape:
            return 0, 0
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return itemsize * sum(min(0, x) for x in reach), itemsize * (sum(max(0, x) for x in reach) + 1)


def view_of(
    argument: str,
    ptr: int,
    shape: tuple[int, ...],
    strides_bytes: Sequence[int],
    itemsize: int,
    dtype: str,
    device: int,
) -> View:
    """A view of an array with strides in bytes.

    Raises
    ------
    ShapeError
        If the array does not start at, or does not step by, whole elements: kernels count in elements.
    """
    if dtype not in TABLE:  # no kernel takes it: the check of dtypes says so
        return View(ptr, tuple(shape), (0,) * len(shape), dtype, device)
    if ptr % itemsize:
        remedy = f"copy {argument}"
        raise ShapeError(explain(f"{argument}'s address", hex(ptr), f"a multiple of its {itemsize}-byte items", remedy))
    for size, stride in zip(shape, strides_bytes, strict=True):
        if size > 1 and stride % itemsize:
            got = f"{tuple(strides_bytes)} bytes"
            remedy = f"copy {argument}"
            raise ShapeError(explain(f"{argument}.strides", got, f"multiples of its {itemsize}-byte items", remedy))
    return View(ptr, tuple(shape), tuple([stride // itemsize for stride in strides_bytes]), dtype, device)


class Native(Protocol):
    """A library with arrays that can be viewed and allocated directly."""

    @property
    def count_writes(self) -> Counter | None:
        """See `Family.count_writes`."""

    def view(self, x: Any, argument: str = "an array") -> View:
        """The array from outside; `argument` is its name in errors."""

    def signature(self, arrays: Sequence[Any]) -> tuple[list[int], Signature] | None:
        """The addresses (a leading 0, then one per array, 0 for None) and all else; None for other libraries' arrays.

        Arrays of equal signatures pass the same checks: shapes, strides, dtypes, devices and the addresses modulo
        ARRAY_ALIGNMENT are equal.
        """

    def matcher(self, arrays: Sequence[Any]) -> Matcher | None:
        """A test for arrays of the same signature that is faster than `signature`, and may miss some; None without."""

    def address(self, x: Any) -> int:
        """The address of its first element."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        """An array that is used on `stream`."""

    def transposed(self, x: Any, axes: tuple[int, ...]) -> Any:
        """View of the same memory with its axes in another order."""

    def contiguous(self, x: Any, stream: int) -> Any:
        """The array itself, or a copy made on `stream`."""

    def scratch(self, nbytes: int, device: int, stream: int) -> tuple[object, int]:
        """Memory that is used on `stream`, 256-byte aligned: its owner, and its address."""

    def current_stream(self, device: int) -> int:
        """The raw handle of the caller's current stream."""

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        """A copy on the host, after the work on `stream`."""


class Family(Protocol):
    """A library and a place."""

    @property
    def name(self) -> str:
        """Name of the library."""

    @property
    def on_gpu(self) -> bool:
        """True if its arrays are in a GPU's memory."""

    @property
    def mutable(self) -> bool:
        """True if results can be written to its arrays."""

    @property
    def takes_stream(self) -> bool:
        """True if a call may name a stream; else its arrays are ordered by CuPy's current one, through DLPack."""

    @property
    def count_writes(self) -> Counter | None:
        """Called with the caller's arrays that a call has written to; None for libraries that do not count."""

    @property
    def native(self) -> Native:
        """Native library that computes on its arrays."""

    def adopt(self, x: Any) -> Any:
        """Return an array of `native` over the same memory."""

    def release(self, x: Any) -> Any:
        """A result of `native` as an array of this family."""

    def settle(self, lent: Iterable[Any]) -> None:
        """Keep the memory of adopted arrays from new use until the work enqueued on the current stream is done."""


class NativeFamily:
    """A family that is native itself: nothing to adopt."""

    mutable = takes_stream = True
    count_writes: Counter | None = None

    def matcher(self, arrays: Sequence[Any]) -> Matcher | None:
        return None

    def adopt(self, x: Any) -> Any:
        return x

    def release(self, x: Any) -> Any:
        return x

    def settle(self, lent: Iterable[Any]) -> None:
        """No-op: the work is on the caller's stream, or on the library's own, which orders later work."""
