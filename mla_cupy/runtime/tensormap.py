"""Tensor maps: descriptions of arrays for TMA.

The driver encodes a map into 128 opaque bytes, which only a driver with a GPU can do; the rules that it demands
are checked here without one, so that a wrong map is an error with a reason and not "invalid argument".
ctypes and a buffer of our own, because cuda.h demands 64-byte (from CUDA 13 on 128-byte) alignment of the map and
the object that cuda.bindings returns has 16.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ArgumentError, explain

MAP_BYTES = 128
_MAP_ALIGNMENT = 128

_ELEMENT = {row.name: (row.tensor_map, row.nbytes) for row in TABLE.values() if row.tensor_map is not None}
_SWIZZLE = {"none": (0, 256 * 16), "32B": (1, 32), "64B": (2, 64), "128B": (3, 128)}
_L2 = {"none": 0, "64B": 1, "128B": 2, "256B": 3}


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map in the driver's order: the innermost dimension first.

    Parameters
    ----------
    dtype : str
        A name of `mla_cupy.dtypes` that TMA supports.
    base : int
        Device address, a multiple of 16.
    dims : tuple of int
        1 to 5 sizes in elements, the innermost first.
    strides_bytes : tuple of int
        Strides of every dimension except the innermost, which is contiguous; multiples of 16.
    box : tuple of int
        Sizes in elements of one copy, each at most 256.
    swizzle : str
        "none", "32B", "64B" or "128B": the span of the swizzle, and the most bytes that a row of the box may have.
    l2 : str
        Promotion of the fetches into L2: "none", "64B", "128B" or "256B".
    array : str
        Name of the array, for errors; "" if there is none.
    """

    dtype: str
    base: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    l2: str = "256B"
    array: str = field(default="", compare=False)

    def validate(self) -> None:
        """Check for everything that the driver rejects.

        Raises
        ------
        ArgumentError
            That names the array, the field and the rule.
        """
        self._among("dtype", _ELEMENT)
        self._among("swizzle", _SWIZZLE)
        self._among("l2", _L2)
        rank = len(self.dims)
        self._demand(1 <= rank <= 5, "dims", self.dims, "1 to 5 dimensions")
        self._demand(len(self.box) == rank, "box", self.box, f"{rank} sizes, one per dimension")
        self._demand(len(self.strides_bytes) == rank - 1, "strides_bytes", self.strides_bytes, f"{rank - 1} strides")
        self._demand(self.base > 0 and self.base % 16 == 0, "base", hex(self.base), "a multiple of 16")
        self._demand(all(0 < size <= 1 << 32 for size in self.dims), "dims", self.dims, "each from 1 to 2^32")
        self._demand(
            all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in self.strides_bytes),
            "strides_bytes",
            self.strides_bytes,
            "multiples of 16 below 2^40",
        )
        self._demand(all(0 < size <= 256 for size in self.box), "box", self.box, "each from 1 to 256")
        row = self.box[0] * _ELEMENT[self.dtype][1]
        self._demand(row % 16 == 0, "box", self.box, f"rows of a multiple of 16 bytes, not of {row}")
        span = _SWIZZLE[self.swizzle][1]
        self._demand(
            row <= span, "box", self.box, f"rows of at most {span} bytes with swizzle {self.swizzle}, not of {row}"
        )

    def _among(self, field: str, allowed: Mapping[str, object]) -> None:
        value = getattr(self, field)
        self._demand(value in allowed, field, repr(value), "one of " + ", ".join(allowed))

    def _demand(self, good: bool, field: str, got: object, expected: str) -> None:
        if not good:
            where = f"the tensor map of {self.array}, {field}" if self.array else f"TensorMapSpec.{field}"
            raise ArgumentError(explain(where, got, expected, f"copy {self.array}" if self.array else ""))


def codes(dtype: str, swizzle: str, l2: str) -> tuple[int, int, int]:
    """The driver's numbers for an element type, a swizzle and a promotion."""
    return _ELEMENT[dtype][0], _SWIZZLE[swizzle][0], _L2[l2]


@functools.lru_cache(maxsize=4096)
def encode(spec: TensorMapSpec) -> bytes:
    """The 128 bytes of `spec`, by the driver. The same arrays come again and again, so they are kept.

    Raises
    ------
    ArgumentError
        If the driver's rules forbid the map.
    RuntimeError
        If the driver refuses it all the same.
    """
    spec.validate()
    storage = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    address = -(-ctypes.addressof(storage) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    rank = len(spec.dims)
    status = _encode_function()(
        address,
        _ELEMENT[spec.dtype][0],
        rank,
        spec.base,
        _array(ctypes.c_uint64, spec.dims),
        _array(ctypes.c_uint64, spec.strides_bytes),
        _array(ctypes.c_uint32, spec.box),
        _array(ctypes.c_uint32, (1,) * rank),
        0,  # no interleave
        _SWIZZLE[spec.swizzle][0],
        _L2[spec.l2],
        0,  # what lies outside reads as zero
    )
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled: the driver refused {spec} with error {status}")
    return ctypes.string_at(address, MAP_BYTES)


@functools.cache
def _encode_function() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    ]
    return function


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
