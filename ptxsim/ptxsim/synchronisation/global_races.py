"""Race detection in global memory (``race_global=True``): what the detector knows about each array.

The launch then has one detector for all its blocks, so that accesses of any two warps, and of what works for them
asynchronously, are told apart. It costs four bytes per word and reading warp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..memory.im2col import Column
from ..memory.tensormap import Decoded
from .shadow import Shadow


class GlobalShadows:
    """Shadow memory of the arrays that one launch touches."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.shadows: dict[int, tuple[Any, Shadow]] = {}

    def of(self, buffer: Any) -> Shadow:
        """Return an array's shadow."""
        found = self.shadows.get(id(buffer))
        if found is None:
            found = self.shadows[id(buffer)] = (buffer, Shadow(buffer.size // 4 + 1, name=buffer.name))
        return found[1]

    def words(self, address: int, size: int) -> tuple[Shadow, np.ndarray] | None:
        """Return the shadow and the words of a run of bytes (None when it is not in global memory)."""
        buffer = self.memory.find(address)
        if buffer is None:
            return None
        offset = address - buffer.base
        return self.of(buffer), np.arange(offset // 4, (offset + size + 3) // 4)

    def words_of_rows(self, addresses: np.ndarray, sizes: np.ndarray, size: int) -> tuple[Shadow, np.ndarray] | None:
        """Return the shadow and the words of runs of ``size`` aligned bytes or none that lie in one array.

        None if they do not: then each has to be looked at.
        """
        taken = addresses[sizes == size]
        if size < 4 or not len(taken) or np.count_nonzero(sizes) != len(taken):
            return None
        buffer = self.memory.find(int(taken[0]))
        if buffer is None or buffer.base % 4:
            return None
        offset = taken - np.uint64(buffer.base)  # what lies below the array wraps to a large number
        if int(offset.max()) + size > buffer.size:
            return None
        return self.of(buffer), (offset.view(np.intp)[:, None] // 4 + np.arange(size // 4)).reshape(-1)

    def tile_words(
        self, tmap: Decoded, rows: list[tuple[int, ...]], offsets: tuple[int, ...] = ()
    ) -> tuple[Shadow, np.ndarray] | None:
        """Return the shadow and the words of the elements of some tiles that lie inside the tensor."""
        buffer = self.memory.find(tmap.address)
        if buffer is None:
            return None
        places = [_element_offsets(tmap, tmap.units(row), offsets) for row in rows]
        first = np.concatenate(places) + (tmap.address - buffer.base)
        units = first[:, None] + np.arange(0, tmap.itemsize, min(4, tmap.itemsize))
        words = np.unique(units // 4)
        return self.of(buffer), words[words < buffer.size // 4 + 1]


def _element_offsets(tmap: Decoded, coords: tuple[int, ...], offsets: tuple[int, ...]) -> np.ndarray:
    """Return the byte offsets of a tile's elements inside the tensor, from its base."""
    if tmap.im2col:
        column = Column(tmap, coords, offsets)
        return column.at[column.inside]
    total, inside = np.zeros((), np.int64), np.ones((), bool)
    strides = (tmap.itemsize, *tmap.strides)
    for at, count, step, extent, stride in zip(coords, tmap.counts, tmap.steps, tmap.dims, strides, strict=False):
        index = at + step * np.arange(count)
        total = total[..., None] + index * stride
        inside = inside[..., None] & (index >= 0) & (index < extent)
    return total[inside]
