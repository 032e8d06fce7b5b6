"""Tiles between global and shared memory: boxes, out-of-bounds fill, swizzles, packed types, reductions."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from ..arithmetic.formats import to_bf16, to_f16
from ..arithmetic.numeric import flush
from ..errors import DescriptorError
from .im2col import Column, load_column, store_column
from .spaces import Memory
from .swizzle import swizzle
from .tensormap import SPANS, Decoded

_FLIP = 5
_OUTSIDE = {2: 0x7FF7, 4: 0x7FF77FF7, 8: 0x7FF77FF77FF77FF7}
"""Bytes that fill elements outside the tensor with ``oob_fill`` 1, by their size, as found on an H200."""

_HALVES = np.array([2, 3, 0, 1])


@lru_cache(maxsize=4096)
def tile_chunks(count: int, mode: int, phase: int, row: int, pitch: int) -> np.ndarray:
    """Return where a tile's chunks go, relative to its start at chunk ``phase`` of a 1024-byte atom."""
    plain = np.arange(count)
    if row < pitch:
        plain = plain // row * pitch + plain % row
    result = swizzle(plain + phase, *SPANS[mode]) - phase
    result.flags.writeable = False
    return result


def destination(start: int, size: int, tmap: Decoded | None = None) -> np.ndarray:
    """Return the shared-memory chunk numbers of ``size`` bytes at absolute byte ``start``, in a tile's order."""
    first = start // 16
    if tmap is None:
        return np.arange(first, first - (-size // 16))
    return tile_chunks(-(-size // 16), tmap.swizzle, first % 64, tmap.row_bytes // 16, tmap.pitch // 16) + first


def flipped(words: np.ndarray, chunks: np.ndarray, mode: int) -> np.ndarray:
    """Exchange the 8-byte halves of the chunks [n, 4 words] that lie in odd 128-byte lines, where the mode does so."""
    if mode != _FLIP:
        return words
    return np.where((chunks >> 3 & 1 == 1)[:, None], words[:, _HALVES], words)


class Region:
    """The part of a tile that lies inside the tensor: a strided window of global memory."""

    def __init__(self, memory: Memory, tmap: Decoded, coords: tuple[int, ...], write: bool) -> None:
        counts = tmap.counts
        byte_strides = (tmap.itemsize, *tmap.strides)
        start, shape, strides, inside = 0, [], [], []
        for coord, count, step, dim, stride in zip(coords, counts, tmap.steps, tmap.dims, byte_strides, strict=False):
            low = max(0, -(coord // step)) if coord < 0 else 0
            high = min(count, max(0, -(-(dim - coord) // step)))
            inside.append(slice(low, max(low, high)))
            shape.append(max(0, high - low))
            strides.append(stride * step)
            start += (coord + low * step) * stride
        self.inside = tuple(reversed(inside))
        self.counts = tuple(reversed(counts))
        self.window: np.ndarray | None = None
        if 0 in shape:
            return
        last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)) + tmap.itemsize
        flat = memory.slice(tmap.address + start, last - start, write)
        base = np.ndarray((), unit_code(tmap), buffer=flat.data if flat.flags.c_contiguous else flat)
        self.window = np.lib.stride_tricks.as_strided(
            base, tuple(reversed(shape)), tuple(reversed(strides)), writeable=write
        )

    def mask(self) -> np.ndarray:
        """Return which units of the tile lie inside the tensor."""
        mask = np.zeros(self.counts, bool)
        if self.window is not None:
            mask[self.inside] = True
        return mask


def unit_code(tmap: Decoded) -> str:
    """Return the NumPy type of a unit of global memory (twelve bytes have no integer type)."""
    return "V12" if tmap.itemsize == 12 else f"u{tmap.itemsize}"


def load_tile(memory: Memory, tmap: Decoded, coords: tuple[int, ...], offsets: tuple[int, ...]) -> np.ndarray:
    """Return the tile at ``coords`` as bytes in shared-memory order, filled outside the tensor."""
    coords = tmap.units(coords)
    if tmap.im2col:
        data, inside = load_column(memory, tmap, coords, offsets)
        tile = data.view(unit_code(tmap))[..., 0]
    else:
        region = Region(memory, tmap, coords, False)
        tile, inside = np.zeros(region.counts, unit_code(tmap)), region.mask()
        if region.window is not None:
            tile[region.inside] = region.window
    if tmap.oob_nan:
        tile[~inside] = _OUTSIDE[tmap.itemsize]
    tile = _converted(np.ascontiguousarray(tile), tmap.dtype)
    if tmap.shared == tmap.itemsize:
        return tile.reshape(-1).view("u1")
    wide = np.zeros((tile.size, tmap.shared), "u1")
    wide[:, : tmap.itemsize] = tile.reshape(-1, 1).view("u1")
    return wide.reshape(-1)


def _converted(tile: np.ndarray, dtype: int) -> np.ndarray:
    """Apply what a load does to values: tf32 types round to nearest even; FTZ types keep subnormals, as on an H200."""
    if dtype not in (11, 12):
        return tile
    even = tile + np.uint32(0xFFF) + (tile >> np.uint32(13) & np.uint32(1))
    return np.where(np.isfinite(tile.view("f4")), even & np.uint32(0xFFFFE000), tile)


def defined_words(tmap: Decoded) -> np.ndarray:
    """Return the definedness words of a chunk that a load has written: the padding of packed types is not."""
    words = tmap.itemsize // 4 if tmap.shared != tmap.itemsize else 4
    return np.array([0x01010101] * words + [0] * (4 - words), "u4")


def inside_bytes(memory: Memory, tmap: Decoded, coords: tuple[int, ...]) -> np.ndarray:
    """Return, per byte of the tile in shared memory, whether it belongs to an element inside the tensor."""
    coords = tmap.units(coords)
    inside = Column(tmap, coords, ()).inside if tmap.im2col else Region(memory, tmap, coords, False).mask()
    return inside.reshape(-1).repeat(tmap.shared)


def store_tile(memory: Memory, tmap: Decoded, coords: tuple[int, ...], data: np.ndarray, reduction: str | None) -> None:
    """Write (or reduce) a tile's bytes into global memory; elements outside the tensor are dropped."""
    coords = tmap.units(coords)
    if tmap.shared != tmap.itemsize:
        data = _squeezed(data)
    code, kind = unit_code(tmap), KINDS.get(tmap.dtype, "")
    if tmap.im2col:
        reduce = None
        if reduction is not None:
            reduce = lambda old, new: combine(old.view(code), new.view(code), reduction, kind).view("u1")  # noqa: E731
        tile = data.reshape(tmap.box[1], tmap.box[0], tmap.itemsize)
        return store_column(memory, tmap, coords, tile, reduce)
    region = Region(memory, tmap, coords, True)
    if region.window is None:
        return None
    tile = data.view(code).reshape(region.counts)[region.inside]
    region.window[...] = tile if reduction is None else combine(region.window, tile, reduction, kind)
    return None


def _squeezed(data: np.ndarray) -> np.ndarray:
    """Return sixteen bytes with an element in their six low bits (b6p2x16) as twelve bytes each."""
    codes = data.reshape(-1, 4, 4).astype("u4") & 63
    joined = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    return np.stack([joined >> 8 * i & 255 for i in range(3)], -1).astype("u1").reshape(-1)


KINDS = {
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 9: "bf16", 10: "f32",
    11: "f32", 12: "f32",
}  # fmt: skip
"""PTX types of a tensor map's elements."""

_REDUCIBLE = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "s32", "u64", "s64"),
    "or": ("u32", "s32", "u64", "s64"),
    "xor": ("u32", "s32", "u64", "s64"),
}
"""Element types of each reduction of cp.reduce.async.bulk.tensor; f64 addition as of the linear form."""


def check_tile(tmap: Decoded, coords: tuple[int, ...]) -> None:
    """Refuse what no tiled copy can do, as found on an H200."""
    if tmap.im2col or tmap.unit > 1:
        return
    if coords[0] * tmap.itemsize % 16:
        raise DescriptorError(f"the first coordinate {coords[0]} is not at a multiple of 16 bytes of the tensor")
    span = SPANS[tmap.swizzle][0]
    if span and tmap.row_bytes > span:
        raise DescriptorError(f"inner row of {tmap.row_bytes} bytes exceeds the {span}-byte swizzle")


def check_store(tmap: Decoded, coords: tuple[int, ...], reduction: str | None) -> None:
    """Refuse what a store or reduction cannot do."""
    check_tile(tmap, coords)
    if not tmap.im2col and min(coords) < 0:
        raise DescriptorError(f"a tile is stored at negative coordinates {coords}: an H200 stops at that")
    if tmap.dtype == 14:
        raise DescriptorError("16 x u4 aligned to 16 bytes (b4x16_p64) cannot be stored")
    if reduction is not None and KINDS.get(tmap.dtype) not in _REDUCIBLE[reduction]:
        raise DescriptorError(f".{reduction} is not possible for elements of CUtensorMapDataType {tmap.dtype}")
    if tmap.im2col and (min(tmap.lower) < 0 or max(tmap.upper) > 0 or min(coords) < 0):
        raise DescriptorError("a store through an im2col map needs a box and coordinates inside the tensor")


def check_load(tmap: Decoded, coords: tuple[int, ...]) -> None:
    """Refuse what a load cannot do."""
    check_tile(tmap, coords)
    if tmap.dtype == 15 and tmap.swizzle == 6:
        raise DescriptorError("16 x u6 with 64-byte swizzle atoms can only be stored")


def combine(old: np.ndarray, new: np.ndarray, reduction: str, kind: str) -> np.ndarray:
    """Return the element-wise reduction of raw (unsigned) arrays interpreted as a PTX type."""
    table = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    if reduction == "inc":
        return np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1))
    if reduction == "dec":
        return np.where((old == 0) | (old > new), new, old - old.dtype.type(1))
    function = table[reduction]
    raw = old.dtype
    a, b = np.ascontiguousarray(old), np.ascontiguousarray(new)
    if kind == "bf16":
        wide = [x.view(ml_dtypes.bfloat16).astype("f8") for x in (a, b)]
        return to_bf16(function(*wide))
    if kind == "f16":
        return to_f16(function(*(x.view("f2").astype("f8") for x in (a, b)))).view("u2")
    if kind == "f32" and reduction == "add":
        # ISA: the current implementation flushes subnormal inputs and results.
        return flush(flush(a.view("f4")) + flush(b.view("f4"))).view(raw)
    code = {"f": "f", "s": "i", "u": "u", "b": "u"}[kind[0]] + str(raw.itemsize)
    return function(a.view(code), b.view(code)).view(raw)
