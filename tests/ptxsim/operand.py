"""Matrix operands in shared memory: from descriptor fields to element values, with poison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from .ops_float import from_bf16

RESERVED_CHUNKS = 64
"""Chunks of 16 bytes below a block's first usable shared address."""

ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


@dataclass(frozen=True)
class SmemLayout:
    """A shared-memory matrix descriptor, decoded: byte quantities, swizzle span in bytes (0: none)."""

    start: int
    lbo: int
    sbo: int
    span: int


@lru_cache(maxsize=1 << 14)
def chunk_plan(
    phase: int, lbo: int, sbo: int, span: int, mn_major: bool, mn: int, depth: int, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return chunk numbers of an operand relative to its start chunk, and the same as word numbers.

    Parameters
    ----------
    phase : int
        Start address / 16 modulo 64 (swizzles depend on the absolute address).
    lbo, sbo : int
        Leading and stride byte offsets.
    span : int
        Swizzle span in bytes: 0, 32, 64 or 128.
    mn_major : bool
        False: K is contiguous (array [mn, k chunk]); True: M or N is (array [mn chunk, k]).
    mn, depth : int
        Extents in elements.
    bits : int
        Element width.
    """
    per_chunk = 128 // bits
    if mn_major:
        i = np.arange(mn // per_chunk)[:, None]
        k = np.arange(depth)[None, :]
        if span:
            width = span // 16
            address = (i % width) * 16 + (i // width) * lbo + (k % 8) * span + (k // 8) * sbo
        else:
            address = i * sbo + (k % 8) * 16 + (k // 8) * lbo
    else:
        i = np.arange(mn)[:, None]
        k = np.arange(depth // per_chunk)[None, :]
        row = span or 16
        address = (i % 8) * row + (i // 8) * sbo + k * (16 if span else lbo)
    chunks = address // 16 + phase
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    chunks = (chunks ^ (chunks >> 3 & mask)) - phase
    words = (chunks.reshape(-1, 1) * 4 + np.arange(4)).reshape(-1)
    chunks.flags.writeable = words.flags.writeable = False
    return chunks, words


def placed(layout: SmemLayout, mn_major: bool, mn: int, depth: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute chunk and word indices of an operand in a block's shared memory."""
    first = layout.start // 16
    plan = chunk_plan(first % 64, layout.lbo, layout.sbo, layout.span, mn_major, mn, depth, bits)
    base = first - RESERVED_CHUNKS
    return plan[0] + base, plan[1] + 4 * base


def fetch(memory: object, chunks: np.ndarray, mn_major: bool, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the operand as a float matrix [mn, k], and per row whether any of it is poison (None: clean)."""
    raw = memory.chunks[chunks]
    defined = memory.chunk_init[chunks]
    bad = None
    if np.count_nonzero(defined != 0x01010101):
        undefined = _elements(defined, mn_major, kind, True)
        bad = (undefined != 0).any(1)
    return _elements(raw, mn_major, kind, False), bad


def _elements(raw: np.ndarray, mn_major: bool, kind: str, poison: bool) -> np.ndarray:
    """Turn gathered chunks [a, b, 4 words] into [mn, k] elements (or their undefined bytes)."""
    width = ELEMENT_BITS[kind] // 8
    flat = raw.reshape(raw.shape[0], -1)
    if poison:
        flat = flat ^ np.uint32(0x01010101)
    values = flat.view(f"u{width}")
    if mn_major:
        per_chunk = 16 // width
        values = values.reshape(raw.shape[0], raw.shape[1], per_chunk).transpose(0, 2, 1)
        values = values.reshape(-1, raw.shape[1])
    return values if poison else widen(values, kind)


_FP8_TABLES = {
    "e4m3": np.arange(256, dtype="u1").view(ml_dtypes.float8_e4m3fn).astype("f4"),
    "e5m2": np.arange(256, dtype="u1").view(ml_dtypes.float8_e5m2).astype("f4"),
}


def widen(values: np.ndarray, kind: str) -> np.ndarray:
    """Return raw elements of a kind as float32 (exact for every kind)."""
    if kind == "bf16":
        return from_bf16(values)
    if kind == "f16":
        return np.ascontiguousarray(values).view("f2").astype("f4")
    if kind == "tf32":
        return (values & np.uint32(0xFFFFE000)).view("f4")
    if kind in _FP8_TABLES:
        return _FP8_TABLES[kind][values]
    return np.ascontiguousarray(values).view("i1" if kind == "s8" else "u1").astype("f4")


def multiply(a: np.ndarray, b: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return ``a @ b.T`` accumulated in float32 (or float64)."""
    if exact:
        return a.astype("f8") @ b.astype("f8").T
    return a @ b.T
