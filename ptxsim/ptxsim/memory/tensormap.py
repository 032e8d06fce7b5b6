"""Tensor maps: encoders with the driver's rules, and the private 128-byte form the simulator reads back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..errors import DescriptorError

MAGIC = b"ptxsimTM"
_FORMAT = "<8s5BQ5Q4Q5H5B6h"
_ADDRESS = struct.calcsize("<8s5B")
_INVALID_VALUE = 1

DTYPES = {
    "uint8": (0, 1), "uint16": (1, 2), "uint32": (2, 4), "int32": (3, 4), "uint64": (4, 8), "int64": (5, 8),
    "float16": (6, 2), "float32": (7, 4), "float64": (8, 8), "bfloat16": (9, 2), "float32_ftz": (10, 4),
    "tfloat32": (11, 4), "tfloat32_ftz": (12, 4), "16u4_align8b": (13, 1), "16u4_align16b": (14, 8),
    "16u6_align16b": (15, 12),
}  # fmt: skip
"""CUtensorMapDataType values and the bytes of an element in global memory (of the packed types: see ``UNITS``)."""

_SIZES = dict(DTYPES.values())
UNITS = {13: (2, 4, 1), 14: (16, 4, 16), 15: (16, 6, 16)}
"""Packed types: elements that stay together, bits of one, bytes of such a unit in shared memory."""

_FLOATING = {6, 7, 8, 9, 10, 11, 12}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3, "128B/32B": 4, "128B/32B/8B": 5, "128B/64B": 6}
"""CUtensorMapSwizzle values; after the slash the bytes kept together (the 8B mode also flips halves of 16 bytes)."""

SPANS = {0: (0, 16), 1: (32, 16), 2: (64, 16), 3: (128, 16), 4: (128, 32), 5: (128, 32), 6: (128, 64)}
"""Span and atom, in bytes, of each swizzle."""


class TensorMapError(DescriptorError):
    """The driver would refuse the tensor map; ``code`` is the CUresult."""

    code = _INVALID_VALUE


class TensorMap(bytes):
    """128 opaque bytes, passed to kernels by value."""


@dataclass(frozen=True)
class Decoded:
    """A tensor map's fields; dimension 0 is the innermost, counted in units of ``unit`` elements.

    ``steps`` are the element strides; the hardware ignores the stride of dimension 0, so it is one here.
    ``lower`` and ``upper`` are the corners of an im2col map's box along dimensions 1, 2, ... (empty for a tiled map),
    whose ``box`` holds the channels per pixel and the pixels per column.
    """

    dtype: int
    unit: int
    itemsize: int
    shared: int
    swizzle: int
    oob_nan: bool
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    im2col: bool
    lower: tuple[int, ...]
    upper: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Units of the box per dimension."""
        if self.im2col:
            return self.box
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=False))

    @property
    def box_bytes(self) -> int:
        """Bytes that one tile occupies in shared memory."""
        return int(np.prod(self.counts)) * self.shared

    @property
    def row_bytes(self) -> int:
        """Bytes of a tile's inner row in shared memory."""
        return self.counts[0] * self.shared

    @property
    def pitch(self) -> int:
        """Bytes from one inner row to the next: a row shorter than the swizzle's span is followed by a gap."""
        return max(self.row_bytes, SPANS[self.swizzle][0])

    @property
    def tx_bytes(self) -> int:
        """Bytes that one tile counts on an mbarrier: without the padding of packed types."""
        return int(np.prod(self.counts)) * self.itemsize

    def units(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Return coordinates with the first one in units."""
        step = self.unit if self.shared == self.itemsize else 128
        if coords[0] % step:
            raise DescriptorError(f"the first coordinate {coords[0]} of a packed type is not a multiple of {step}")
        return (coords[0] // self.unit, *coords[1:])


def _refuse(condition: bool, why: str) -> None:
    if condition:
        raise TensorMapError(f"CUDA_ERROR_INVALID_VALUE (1): {why}")


def _code(dtype: str | int, swizzle: str | int) -> tuple[int, int]:
    """Return a type's and a swizzle's values."""
    code = DTYPES[dtype][0] if isinstance(dtype, str) else int(dtype)
    mode = SWIZZLES[swizzle] if isinstance(swizzle, str) else int(swizzle)
    _refuse(code not in _SIZES, f"data type {code} is unknown")
    _refuse(mode not in SPANS, f"swizzle {mode} is unknown")
    return code, mode


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
        Device address of the tensor (see :class:`~.spaces.Memory`).
    dims : sequence of int
        Extents, innermost first.
    strides : sequence of int
        Byte strides of dimensions 1, 2, ...
    box : sequence of int
        Extents of a tile.
    element_strides : sequence of int, optional
        Traversal strides, all one by default; the stride of dimension 0 is ignored, as by the hardware.
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
    DescriptorError
        For interleaved layouts, which the simulator does not model.
    """
    code, mode = _code(dtype, swizzle)
    dims, strides, box = (tuple(int(v) for v in seq) for seq in (dims, strides, box))
    rank = len(dims)
    steps = tuple(int(v) for v in element_strides) if element_strides is not None else (1,) * rank
    _refuse(not 1 <= rank <= 5, f"rank {rank} is outside 1..5")
    _refuse(len(box) != rank, "array lengths differ from the rank")
    _refuse(any(not 1 <= b <= 256 for b in box), f"box extents {box} must be in 1..256")
    _check(code, mode, address, dims, strides, steps, box[0], interleave, l2_promotion, oob_fill)
    return _pack(code, mode, oob_fill, address, dims, strides, box, steps, None)


def encode_im2col(
    dtype: str | int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    element_strides: Sequence[int] | None = None,
    swizzle: str | int = 0,
    interleave: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> TensorMap:
    """Encode an im2col tensor map under the rules of ``cuTensorMapEncodeIm2col``.

    Parameters
    ----------
    dtype, address, strides, element_strides, swizzle, interleave, l2_promotion, oob_fill
        As in :func:`encode_tiled`.
    dims : sequence of int
        Extents in the order C, W, H, D, N (three to five of them).
    lower, upper : sequence of int
        The box's corners along W, H, D: offsets from the first and from the last pixel.
    channels : int
        Channels per pixel.
    pixels : int
        Pixels per column.

    Returns
    -------
    TensorMap
        128 bytes in the simulator's own layout.

    Raises
    ------
    TensorMapError
        Where the driver returns CUDA_ERROR_INVALID_VALUE.
    """
    code, mode = _code(dtype, swizzle)
    dims, strides, lower, upper = (tuple(int(v) for v in seq) for seq in (dims, strides, lower, upper))
    rank = len(dims)
    steps = tuple(int(v) for v in element_strides) if element_strides is not None else (1,) * rank
    _refuse(not 3 <= rank <= 5, f"rank {rank} is outside 3..5")
    _refuse(len(lower) != rank - 2 or len(upper) != rank - 2, f"corners of a rank {rank} map have {rank - 2} values")
    limit = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}[rank]
    _refuse(any(not -limit <= v < limit for v in (*lower, *upper)), f"corners must be in {-limit}..{limit - 1}")
    for extent, low, high in zip(dims[1:-1], lower, upper, strict=True):
        _refuse(extent + high <= low, f"the box from {low} to {extent - 1 + high} is empty")
    _refuse(not 1 <= channels <= 256, f"{channels} channels per pixel: 1..256")
    _refuse(not 1 <= pixels <= 1024, f"{pixels} pixels per column: 1..1024")
    _check(code, mode, address, dims, strides, steps, channels, interleave, l2_promotion, oob_fill)
    return _pack(code, mode, oob_fill, address, dims, strides, (channels, pixels), steps, (lower, upper))


def _check(
    code: int, mode: int, address: int, dims: tuple, strides: tuple, steps: tuple, inner: int, interleave: int,
    l2_promotion: int, oob_fill: int,
) -> None:  # fmt: skip
    """Refuse arguments that the driver refuses for both kinds; ``inner`` is the box's extent along dimension 0."""
    rank = len(dims)
    padded = code in (14, 15)
    wide = 32 if padded or interleave == 2 else 16
    _refuse(len(strides) != rank - 1 or len(steps) != rank, "array lengths differ from the rank")
    _refuse(address % wide != 0, f"global address {address:#x} is not a multiple of {wide}")
    _refuse(any(not 1 <= d <= 1 << 32 for d in dims), f"extents {dims} must be in 1..2^32")
    _refuse(any(s % wide or not 0 <= s < 1 << 40 for s in strides), f"strides {strides}: multiples of {wide}, < 2^40")
    _refuse(any(not 1 <= s <= 8 for s in steps), f"element strides {steps} must be in 1..8")
    _refuse(padded and dims[0] % 128 != 0, f"extent {dims[0]} of a padded type must be a multiple of 128")
    _refuse(padded and inner != 128, f"the box's inner extent {inner} must be 128 for a padded type")
    _refuse(code == 13 and dims[0] % 2 != 0, f"extent {dims[0]} of a 4-bit type must be even")
    width = inner * UNITS[code][1] // 8 if code in UNITS else inner * _SIZES[code]
    _refuse(not interleave and width % 16 != 0, f"the box's inner row of {width} bytes is not a multiple of 16")
    span = SPANS[mode][0]
    if not interleave and span:
        _refuse(width > span, f"inner row of {width} bytes exceeds the {span}-byte swizzle")
    _refuse(code == 14 and mode not in (0, 3, 4), f"swizzle {mode} is not possible for 16 x u4 aligned to 16 bytes")
    _refuse(code == 15 and mode not in (0, 3, 4, 6), f"swizzle {mode} is not possible for 16 x u6 aligned to 16 bytes")
    _refuse(not 0 <= l2_promotion <= 3, f"L2 promotion {l2_promotion} is unknown")
    _refuse(oob_fill not in (0, 1), f"out-of-bounds fill {oob_fill} is unknown")
    _refuse(oob_fill == 1 and code not in _FLOATING, "NaN fill needs a floating-point type")
    _refuse(interleave not in (0, 1, 2), f"interleave {interleave} is unknown")
    if interleave:
        _refuse(rank < 3, f"rank {rank}: interleaved layouts need 3 or more")
        _refuse(interleave == 2 and mode != 1, "a 32-byte interleave needs the 32-byte swizzle")
        _refuse(code == 15, "16 x u6 aligned to 16 bytes cannot be interleaved")
        raise DescriptorError("the driver takes this tensor map, but interleaved layouts are not modelled")


def _pack(
    code: int, mode: int, oob: int, address: int, dims: tuple, strides: tuple, box: tuple, steps: tuple,
    corners: tuple | None,
) -> TensorMap:  # fmt: skip
    rank = len(dims)
    lower, upper = corners or ((), ())
    raw = struct.pack(
        _FORMAT, MAGIC, code, rank, mode, oob, corners is not None, address,
        *_padded([d - 1 for d in dims], 5), *_padded(strides, 4), *_padded(box, 5), *_padded(steps, 5),
        *_padded(lower, 3), *_padded(upper, 3),
    )  # fmt: skip
    return TensorMap(raw.ljust(128, b"\0"))


def with_address(raw: bytes, address: int) -> TensorMap:
    """Return a tensor map of the same layout over memory at another address (``cuTensorMapReplaceAddress``)."""
    decode(bytes(raw))
    wide = 32 if raw[8] in (14, 15) else 16
    _refuse(address % wide != 0, f"global address {address:#x} is not a multiple of {wide}")
    return TensorMap(raw[:_ADDRESS] + struct.pack("<Q", address) + raw[_ADDRESS + 8 :])


def _padded(values: Sequence[int], count: int) -> list[int]:
    return [*values, *(0,) * (count - len(values))]


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> Decoded:
    """Decode a tensor map; one that this simulator did not encode is an error."""
    if raw[:8] != MAGIC:
        raise DescriptorError("this tensor map was not encoded with ptxsim.encode_tiled or encode_im2col")
    _, code, rank, mode, oob, im2col, address, *rest = struct.unpack_from(_FORMAT, raw)
    dims, strides, box, steps, corners = rest[:5], rest[5:9], rest[9:14], rest[14:19], rest[19:]
    size = _SIZES[code]
    unit, _, shared = UNITS.get(code, (1, 0, size))
    extents = ((dims[0] + 1) // unit, *(d + 1 for d in dims[1:rank]))
    spatial = rank - 2 if im2col else 0
    return Decoded(
        code, unit, size, shared, mode, bool(oob), address, extents, tuple(strides[: rank - 1]),
        (box[0] // unit, *box[1 : 2 if im2col else rank]), (1, *steps[1:rank]), bool(im2col),
        tuple(corners[:spatial]), tuple(corners[3 : 3 + spatial]),
    )  # fmt: skip
