"""NumPy arrays, bfloat16 and the 8-bit floats as dtypes of `ml_dtypes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mla_cupy.arrays.view import ARRAY_ALIGNMENT, HOST, Native, NativeFamily, Signature, View, view_of
from mla_cupy.dtypes import TABLE

DTYPES = {name: row.numpy for name, row in TABLE.items()}
_NAMES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: Any) -> str:
    """The name of a NumPy dtype; unsupported dtypes keep their own."""
    name = _NAMES.get(dtype)
    return name if name is not None else str(dtype)


class NumpyFamily(NativeFamily):
    """NumPy arrays."""

    name, on_gpu = "numpy", False

    @property
    def native(self) -> Native:
        return self

    def view(self, x: Any, argument: str = "an array") -> View:
        dtype = x.dtype
        return view_of(argument, self.address(x), x.shape, x.strides, max(1, dtype.itemsize), name_of(dtype), HOST)

    def signature(self, arrays: Sequence[Any]) -> tuple[list[int], Signature] | None:
        addresses: list[int] = [0]
        key: list[Any] = []
        for x in arrays:
            if x is None:
                addresses.append(0)
                key.append(None)
            elif type(x) is np.ndarray:
                address = self.address(x)
                addresses.append(address)
                key += (x.shape, x.strides, x.dtype, address % ARRAY_ALIGNMENT, x.flags.writeable)
            else:
                return None
        return addresses, tuple(key)

    def address(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0])

    def transposed(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.transpose(axes)

    def contiguous(self, x: Any, stream: int) -> Any:
        return np.ascontiguousarray(x)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> Any:
        return np.empty(shape, DTYPES[dtype])

    def scratch(self, nbytes: int, device: int, stream: int) -> tuple[object, int]:
        memory = self.empty((nbytes,), "uint8", device, stream)
        return memory, self.address(memory)

    def current_stream(self, device: int) -> int:
        return 0

    def to_numpy(self, x: Any, stream: int) -> np.ndarray[Any, Any]:
        return np.asarray(x)


NUMPY = NumpyFamily()
