"""Tensor maps: an encoder with the driver's rules, and the private 128-byte form the simulator reads back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import DescriptorError

MAGIC = b"ptxsimTM"
_FORMAT = "<8sBBBBQ5Q4Q5H5B"
_INVALID_VALUE = 1

DTYPES = {
    "uint8": (0, 1), "uint16": (1, 2), "uint32": (2, 4), "int32": (3, 4), "uint64": (4, 8), "int64": (5, 8),
    "float16": (6, 2), "float32": (7, 4), "float64": (8, 8), "bfloat16": (9, 2), "float32_ftz": (10, 4),
    "tfloat32": (11, 4), "tfloat32_ftz": (12, 4),
}  # fmt: skip
"""CUtensorMapDataType values and element sizes."""

_SIZES = dict(DTYPES.values())
_FLOATING = {6, 7, 8, 9, 10, 11, 12}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_SWIZZLE_SPAN = {1: 32, 2: 64, 3: 128}


class TensorMapError(DescriptorError):
    """The driver would refuse the tensor map; ``code`` is the CUresult."""

    code = _INVALID_VALUE


class TensorMap(bytes):
    """128 opaque bytes, passed to kernels by value."""


@dataclass(frozen=True)
class Decoded:
    """A tensor map's fields; dimension 0 is the innermost."""

    dtype: int
    itemsize: int
    swizzle: int
    oob_nan: bool
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of the box per dimension."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=False))

    @property
    def box_bytes(self) -> int:
        """Bytes that one tile occupies in shared memory."""
        return int(np.prod(self.counts)) * self.itemsize


def _refuse(condition: bool, why: str) -> None:
    if condition:
        raise TensorMapError(f"CUDA_ERROR_INVALID_VALUE (1): {why}")


def encode_tiled(
    dtype: str | int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    swizzle: str | int = 0,
    interleave: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> TensorMap:
    """Encode a tiled tensor map under the rules of ``cuTensorMapEncodeTiled``.

    Parameters
    ----------
    dtype : str or int
        Element type, a name of :data:`DTYPES` or its CUtensorMapDataType value.
    address : int
        Device address of the tensor (see :class:`~.memory.Memory`).
    dims : sequence of int
        Extents, innermost first.
    strides : sequence of int
        Byte strides of dimensions 1, 2, ...
    box : sequence of int
        Extents of a tile.
    element_strides : sequence of int, optional
        Traversal strides, all one by default.
    swizzle, interleave, l2_promotion, oob_fill : optional
        As the driver's enumerations; ``swizzle`` may be a name of :data:`SWIZZLES`.

    Returns
    -------
    TensorMap
        128 bytes in the simulator's own layout.

    Raises
    ------
    TensorMapError
        Where the driver returns CUDA_ERROR_INVALID_VALUE.
    """
    code = DTYPES[dtype][0] if isinstance(dtype, str) else int(dtype)
    mode = SWIZZLES[swizzle] if isinstance(swizzle, str) else int(swizzle)
    dims, strides, box = (tuple(int(v) for v in seq) for seq in (dims, strides, box))
    rank = len(dims)
    steps = tuple(int(v) for v in element_strides) if element_strides is not None else (1,) * rank
    _refuse(code not in _SIZES, f"data type {code} is unknown (or a packed sub-byte type, which is not modelled)")
    item = _SIZES[code]
    _refuse(not 1 <= rank <= 5, f"rank {rank} is outside 1..5")
    _refuse(len(strides) != rank - 1 or len(box) != rank or len(steps) != rank, "array lengths differ from the rank")
    _refuse(interleave != 0, "interleaved layouts are not modelled")
    _refuse(address % 16 != 0, f"global address {address:#x} is not a multiple of 16")
    _refuse(any(not 1 <= d <= 1 << 32 for d in dims), f"extents {dims} must be in 1..2^32")
    _refuse(any(s % 16 or not 0 <= s < 1 << 40 for s in strides), f"strides {strides}: multiples of 16 below 2^40")
    _refuse(any(not 1 <= b <= 256 for b in box), f"box extents {box} must be in 1..256")
    _refuse(any(not 1 <= s <= 8 for s in steps), f"element strides {steps} must be in 1..8")
    _refuse(box[0] * item % 16 != 0, f"the box's inner row of {box[0] * item} bytes is not a multiple of 16")
    _refuse(mode not in (0, 1, 2, 3), f"swizzle {mode} is unknown (or one of the wide-atom modes, not modelled)")
    span = _SWIZZLE_SPAN.get(mode)
    _refuse(
        span is not None and box[0] * item > span, f"inner row of {box[0] * item} bytes exceeds the {span}-byte swizzle"
    )
    _refuse(not 0 <= l2_promotion <= 3, f"L2 promotion {l2_promotion} is unknown")
    _refuse(oob_fill not in (0, 1), f"out-of-bounds fill {oob_fill} is unknown")
    _refuse(oob_fill == 1 and code not in _FLOATING, "NaN fill needs a floating-point type")
    pad = 5 - rank
    raw = struct.pack(
        _FORMAT, MAGIC, code, rank, mode, oob_fill, address,
        *(d - 1 for d in dims), *(0,) * pad,
        *strides, *(0,) * (5 - rank),
        *box, *(0,) * pad, *(1, *steps[1:]), *(0,) * pad,
    )  # fmt: skip
    return TensorMap(raw.ljust(128, b"\0"))


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> Decoded:
    """Decode a tensor map; one that this simulator did not encode is an error."""
    if raw[:8] != MAGIC:
        raise DescriptorError("this tensor map was not encoded with ptxsim.encode_tiled")
    _, code, rank, mode, oob, address, *rest = struct.unpack_from(_FORMAT, raw)
    dims, strides, box, steps = rest[:5], rest[5:9], rest[9:14], rest[14:19]
    return Decoded(
        code, _SIZES[code], mode, bool(oob), address,
        tuple(d + 1 for d in dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), tuple(steps[:rank]),
    )  # fmt: skip
