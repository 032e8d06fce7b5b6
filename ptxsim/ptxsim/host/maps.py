"""Tensor maps that host programs encode."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ..errors import SimError
from ..memory.tensormap import TensorMapError, encode_im2col, encode_tiled, with_address
from .images import HostError


def _encoded(encode: Callable, *args: Any) -> bytes:
    try:
        return bytes(encode(*args))
    except TensorMapError as error:
        raise HostError(1, f"tensor map: {error}", bad=False) from None
    except SimError as error:
        raise HostError(801, f"tensor map: {error}") from None


def tiled(data: bytes) -> bytes:
    """Encode a tiled map from the 64-bit words of a request: scalars, then the lists."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    (kind, rank, address, interleave, swizzle, promotion, fill), rest = words[:7], words[7:]
    dims, strides, box, steps = _split(rest, (rank, rank - 1, rank, rank))
    return _encoded(encode_tiled, kind, address, dims, strides, box, steps, swizzle, interleave, promotion, fill)


def im2col(data: bytes) -> bytes:
    """Encode an im2col map, likewise."""
    words = struct.unpack(f"<{len(data) // 8}q", data)
    (kind, rank, address, interleave, swizzle, promotion, fill, channels, pixels), rest = words[:9], words[9:]
    dims, strides, lower, upper, steps = _split(rest, (rank, rank - 1, rank - 2, rank - 2, rank))
    shape = (dims, strides, lower, upper, channels, pixels, steps)
    return _encoded(encode_im2col, kind, address, *shape, swizzle, interleave, promotion, fill)


def moved(data: bytes) -> bytes:
    """Return a map over memory at another address."""
    return _encoded(with_address, data[:128], struct.unpack_from("<Q", data, 128)[0])


def _split(values: tuple, counts: tuple[int, ...]) -> list[tuple]:
    """Cut a sequence into runs of these lengths."""
    out, at = [], 0
    for count in counts:
        out.append(values[at : at + count])
        at += count
    return out
