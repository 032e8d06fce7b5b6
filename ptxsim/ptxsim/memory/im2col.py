"""The im2col mode of tensor copies: columns of pixels, each with a run of channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import MemoryFault
from .spaces import Memory
from .tensormap import Decoded

_OFFSET_BITS = {3: 16, 4: 8, 5: 5}


def column(tmap: Decoded, coords: tuple[int, ...]) -> np.ndarray:
    """Return the base coordinates [pixels, rank - 1] (W, H, D, N) of a column that starts at ``coords``.

    Pixels follow each other along W from the start to the box's upper corner, then W begins again at the lower corner
    and H advances, and so on to N; each advance is the traversal stride.
    """
    spatial = tmap.rank - 2
    tops = [extent - 1 + high for extent, high in zip(tmap.dims[1:-1], tmap.upper, strict=True)]
    place = list(coords[1:])
    for name, at, low, top in zip("WHD", place, tmap.lower, tops, strict=False):
        if not low <= at <= top:
            raise MemoryFault(f"im2col coordinate {name} = {at} is outside the box {low}..{top}")
    pixels = np.empty((tmap.box[1], tmap.rank - 1), np.int64)
    for row in pixels:
        row[:] = place
        for d in range(spatial):
            place[d] += tmap.steps[d + 1]
            if place[d] <= tops[d]:
                break
            place[d] = tmap.lower[d]
        else:
            place[spatial] += tmap.steps[spatial + 1]
    return pixels


class Column:
    """Places of a column's elements: byte offsets [pixels, channels] in the tensor, and which are inside."""

    def __init__(self, tmap: Decoded, coords: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        limit = 1 << _OFFSET_BITS[tmap.rank]
        if any(not 0 <= v < limit for v in offsets):
            raise MemoryFault(f"im2col offsets {offsets} must be in 0..{limit - 1}")
        pixels = column(tmap, coords)
        pixels[:, : len(offsets)] += np.array(offsets, np.int64)
        inside = np.all((pixels >= 0) & (pixels < np.array(tmap.dims[1:])), axis=1)
        channels = coords[0] + np.arange(tmap.box[0])
        self.inside = inside[:, None] & ((channels >= 0) & (channels < tmap.dims[0]))
        self.at = (pixels @ np.array(tmap.strides, np.int64))[:, None] + channels * tmap.itemsize

    def window(self, memory: Memory, tmap: Decoded, write: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of global memory that hold the column, and the index of each inside element's first byte."""
        at = self.at[self.inside]
        if not at.size:
            return np.empty(0, "u1"), at
        low = int(at.min())
        return memory.slice(tmap.address + low, int(at.max()) - low + tmap.itemsize, write), at - low


def load_column(
    memory: Memory, tmap: Decoded, coords: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return a column as bytes [pixels, channels, itemsize], zero outside the tensor, and which elements are inside."""
    where = Column(tmap, coords, offsets)
    data, at = where.window(memory, tmap, False)
    tile = np.zeros((*where.inside.shape, tmap.itemsize), "u1")
    tile[where.inside] = data[at[:, None] + np.arange(tmap.itemsize)]
    return tile, where.inside


def store_column(memory: Memory, tmap: Decoded, coords: tuple[int, ...], tile: np.ndarray, combine: Any) -> None:
    """Write elements [pixels, channels, itemsize bytes] into global memory; ``combine(old, new)`` reduces."""
    where = Column(tmap, coords, ())
    data, at = where.window(memory, tmap, True)
    index = at[:, None] + np.arange(tmap.itemsize)
    new = np.ascontiguousarray(tile[where.inside])
    data[index] = combine(data[index], new) if combine else new
