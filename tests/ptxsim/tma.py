"""Tiles between global and shared memory: boxes, out-of-bounds fill, swizzles, reductions."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from .errors import MemoryFault
from .memory import Memory
from .ops_float import to_bf16, to_f16
from .tensormap import Decoded

_SWIZZLE_MASK = {0: 0, 1: 1, 2: 3, 3: 7}


def swizzle_chunks(chunks: np.ndarray, mode: int) -> np.ndarray:
    """Apply a TMA swizzle to 16-byte chunk numbers (addresses / 16).

    The byte-address rule is: 128B: bits 4-6 ^= bits 7-9; 64B: bits 4-5 ^= bits 7-8; 32B: bit 4 ^= bit 7.
    """
    mask = _SWIZZLE_MASK[mode]
    return chunks ^ (chunks >> 3 & mask) if mask else chunks


@lru_cache(maxsize=4096)
def tile_chunks(count: int, mode: int, phase: int) -> np.ndarray:
    """Return where a tile's chunks go, relative to its start at chunk ``phase`` of a 1024-byte atom."""
    linear = np.arange(count) + phase
    result = swizzle_chunks(linear, mode) - phase
    result.flags.writeable = False
    return result


def destination(start: int, size: int, mode: int) -> np.ndarray:
    """Return the shared-memory chunk numbers of a tile at absolute byte ``start``, in tile order."""
    first = start // 16
    phase = first % 64
    return tile_chunks(-(-size // 16), mode, phase) + first


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
        self.empty = 0 in shape
        self.counts = tuple(reversed(counts))
        self.window: np.ndarray | None = None
        if self.empty:
            return
        last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)) + tmap.itemsize
        flat = memory.slice(tmap.address + start, last - start, write)
        code = f"u{tmap.itemsize}"
        base = np.ndarray((), code, buffer=flat.data if flat.flags.c_contiguous else flat)
        self.window = np.lib.stride_tricks.as_strided(
            base, tuple(reversed(shape)), tuple(reversed(strides)), writeable=write
        )


def load_box(memory: Memory, tmap: Decoded, coords: tuple[int, ...]) -> np.ndarray:
    """Return the tile at ``coords`` as bytes in tile order, filled outside the tensor."""
    region = Region(memory, tmap, coords, False)
    code = f"u{tmap.itemsize}"
    if region.window is not None and region.window.shape == region.counts:
        return np.ascontiguousarray(region.window).reshape(-1).view("u1")
    tile = np.zeros(region.counts, code)
    if tmap.oob_nan:
        tile[...] = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[tmap.itemsize]
    if region.window is not None:
        tile[region.inside] = region.window
    return tile.reshape(-1).view("u1")


def inside_mask(memory: Memory, tmap: Decoded, coords: tuple[int, ...]) -> np.ndarray:
    """Return, per byte of the tile, whether it lies inside the tensor."""
    region = Region(memory, tmap, coords, False)
    mask = np.zeros(region.counts, f"u{tmap.itemsize}")
    if not region.empty:
        mask[region.inside] = np.iinfo(mask.dtype).max
    return mask.reshape(-1).view("u1") != 0


def store_box(memory: Memory, tmap: Decoded, coords: tuple[int, ...], data: np.ndarray, reduction: str | None) -> None:
    """Write (or reduce) a tile's bytes into global memory; elements outside the tensor are dropped."""
    region = Region(memory, tmap, coords, True)
    if region.window is None:
        return
    tile = data.view(f"u{tmap.itemsize}").reshape(region.counts)[region.inside]
    if reduction is None:
        region.window[...] = tile
    else:
        region.window[...] = combine(region.window, tile, reduction, element_kind(tmap.dtype))


_KINDS = {
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 9: "bf16", 10: "f32",
    11: "f32", 12: "f32",
}  # fmt: skip


def element_kind(dtype: int) -> str:
    """Return the PTX type of a tensor map's elements."""
    return _KINDS[dtype]


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
    code = {"f": "f", "s": "i", "u": "u", "b": "u"}[kind[0]] + str(raw.itemsize)
    return function(a.view(code), b.view(code)).view(raw)


def require(condition: bool, why: str) -> None:
    """Raise a memory fault unless a condition holds."""
    if not condition:
        raise MemoryFault(why)
