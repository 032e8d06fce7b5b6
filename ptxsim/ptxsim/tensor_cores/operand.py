"""Matrix operands in shared memory: from descriptor fields to element values, with poison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ..arithmetic.formats import from_bf16
from ..arithmetic.numeric import count_nonzero
from ..memory.swizzle import swizzle

RESERVED_CHUNKS = 64
"""Chunks of 16 bytes below a block's first usable shared address."""

ELEMENT_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4,
    "e2m1x2": 4,
}  # fmt: skip
"""Width of an element; in shared memory sixteen 6- or 4-bit elements are packed at the start of 16 bytes.

``e2m1x2`` are 4-bit elements that fill their bytes, as the MMAs with K = 64 take them.
"""

CONTAINER_SHIFT = {"e2m3": 1, "e3m2": 1, "e2m1": 2}
"""Offset of a 6- or 4-bit element in its 8-bit container in tensor memory.

The ISA shows it in pictures only (its text for mma.sync puts 6-bit elements at bit 0). These are the positions that
CUTLASS's example ``cp_narrow_a_to_tmem_mma.py`` states for tcgen05: 0xxxxxx0 and 00xxxx00.
"""


@dataclass(frozen=True)
class SmemLayout:
    """A shared-memory matrix descriptor, decoded.

    ``span`` is the swizzle span in bytes (0: none), ``atom`` the bytes that a swizzle keeps together, ``base`` the
    128-byte line (modulo 8) at which the swizzle's pattern starts; the other fields are byte quantities.
    """

    start: int
    lbo: int
    sbo: int
    span: int
    atom: int = 16
    base: int = 0


@lru_cache(maxsize=1 << 14)
def chunk_plan(
    phase: int, shape: tuple[int, int, int, int, int], mn_major: bool, mn: int, depth: int, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return chunk numbers of an operand relative to its start chunk, and the same as word numbers.

    Parameters
    ----------
    phase : int
        Start address / 16 modulo 64 (swizzles depend on the absolute address).
    shape : tuple
        Leading and stride byte offsets, swizzle span, atom and base.
    mn_major : bool
        False: K is contiguous (array [mn, k chunk]); True: M or N is (array [mn chunk, k]).
    mn, depth : int
        Extents in elements.
    bits : int
        Element width (of the container, where elements are narrower than a byte).
    """
    lbo, sbo, span, atom, base = shape
    per_chunk = 128 // bits
    if mn_major:
        i = np.arange(mn // per_chunk)[:, None]
        k = np.arange(depth)[None, :]
        if span:
            # Atoms of a span by eight k; by four k where the swizzle keeps 32 bytes together.
            width, lines = span // 16, 128 // atom if atom > 16 else 8
            address = (i % width) * 16 + (i // width) * lbo + (k % lines) * span + (k // lines) * sbo
        else:
            address = i * sbo + (k % 8) * 16 + (k // 8) * lbo
    else:
        i = np.arange(mn)[:, None]
        k = np.arange(depth // per_chunk)[None, :]
        row = span or 16
        address = (i % 8) * row + (i // 8) * sbo + k * (16 if span else lbo)
    chunks = swizzle(address // 16 + phase, span, atom, base) - phase
    words = (chunks.reshape(-1, 1) * 4 + np.arange(4)).reshape(-1)
    chunks.flags.writeable = words.flags.writeable = False
    return chunks, words


def placed(layout: SmemLayout, mn_major: bool, mn: int, depth: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the absolute chunk and word indices of an operand in a block's shared memory."""
    first = layout.start // 16
    shape = (layout.lbo, layout.sbo, layout.span, layout.atom, layout.base)
    plan = chunk_plan(first % 64, shape, mn_major, mn, depth, bits)
    base = first - RESERVED_CHUNKS
    return plan[0] + base, plan[1] + 4 * base


def fetch(memory: Any, chunks: np.ndarray, mn_major: bool, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the operand as a float matrix [mn, k], and per row whether any of it is poison (None: clean)."""
    raw = memory.chunks[chunks]
    defined = memory.chunk_init[chunks]
    bad = None
    if count_nonzero(defined != 0x01010101):
        # A byte that is not defined is all ones, so that every element that has a bit of it is not zero.
        undefined = (defined.view("u1") ^ np.uint8(1)) * np.uint8(255)
        bad = (_elements(undefined.view("u4"), mn_major, kind) != 0).any(1)
    return widen(_elements(raw, mn_major, kind), kind), bad


def _elements(raw: np.ndarray, mn_major: bool, kind: str) -> np.ndarray:
    """Turn gathered chunks [a, b, 4 words] into raw elements [mn, k]."""
    bits = ELEMENT_BITS[kind]
    if kind == "e2m1x2":
        return nibbles(raw.reshape(raw.shape[0], -1).view("u1"))
    if bits < 8:
        values = unpack(raw.reshape(*raw.shape[:2], 4).view("u1"), bits).reshape(raw.shape[0], -1)
    else:
        values = raw.reshape(raw.shape[0], -1).view(f"u{bits // 8}")
    if mn_major:
        per_chunk = 128 // max(bits, 8)
        values = values.reshape(raw.shape[0], raw.shape[1], per_chunk).transpose(0, 2, 1)
        values = values.reshape(-1, raw.shape[1])
    return values


def nibbles(data: np.ndarray) -> np.ndarray:
    """Return two 4-bit elements per byte [..., n], the low one first."""
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def unpack(chunks: np.ndarray, bits: int) -> np.ndarray:
    """Return the sixteen 6- or 4-bit elements packed at the start of 16-byte chunks [..., 16], as bytes."""
    if bits == 4:
        return nibbles(chunks[..., :8])
    triple = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype("u4")
    joined = triple[..., 0] | triple[..., 1] << 8 | triple[..., 2] << 16
    parts = [(joined >> (6 * j) & 63).astype("u1") for j in range(4)]
    return np.stack(parts, -1).reshape(chunks.shape)


def _small_floats(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Return the values of a float format without infinities and NaNs, by bit pattern."""
    bias = (1 << exponent_bits - 1) - 1
    code = np.arange(1 << exponent_bits + mantissa_bits + 1)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(code >> exponent_bits + mantissa_bits, -magnitude, magnitude).astype("f4")


_TABLES = {
    "e4m3": np.arange(256, dtype="u1").view(ml_dtypes.float8_e4m3fn).astype("f4"),
    "e5m2": np.arange(256, dtype="u1").view(ml_dtypes.float8_e5m2).astype("f4"),
    "e2m3": _small_floats(2, 3),
    "e3m2": _small_floats(3, 2),
    "e2m1": _small_floats(2, 1),
    "e2m1x2": _small_floats(2, 1),
}


def widen(values: np.ndarray, kind: str) -> np.ndarray:
    """Return raw elements of a kind as float32 (exact for every kind)."""
    if kind == "bf16":
        return from_bf16(values)
    if kind == "f16":
        return np.ascontiguousarray(values).view("f2").astype("f4")
    if kind == "tf32":
        return (values & np.uint32(0xFFFFE000)).view("f4")
    if kind in _TABLES:
        return _TABLES[kind][values]
    return np.ascontiguousarray(values).view("i1" if kind == "s8" else "u1").astype("f4")


def from_containers(values: np.ndarray, kind: str) -> tuple[np.ndarray, bool]:
    """Return 8-bit containers of tensor memory as raw elements, and whether padding bits are set."""
    if kind not in CONTAINER_SHIFT:
        return values, False
    shift, bits = CONTAINER_SHIFT[kind], ELEMENT_BITS[kind]
    mask = ((1 << bits) - 1) << shift
    return (values & mask) >> shift, bool(count_nonzero(values & ~np.uint8(mask)))


def multiply(a: np.ndarray, b: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return ``a @ b.T`` accumulated in float32 (or float64)."""
    if exact:
        return a.astype("f8") @ b.astype("f8").T
    return a @ b.T


#: Fraction bits that Hopper's tensor cores keep of products of 8-bit floating-point numbers, and of their sums.
FP8_FRACTION_BITS = 13
#: Exponents of subnormal numbers.
_LEAST_EXPONENT = {"e4m3": -6, "e5m2": -14}
_NOTHING = -200
_COLUMNS = 64  # elements at a time, which fit into the caches
_LEAST_UNIT = -126  # so that units, and their inverses, are normal numbers


@np.errstate(invalid="ignore", over="ignore")
def add_fp8_products(a: np.ndarray, b: np.ndarray, before: np.ndarray | None, kinds: tuple[str, str]) -> np.ndarray:
    """Return ``before + a @ b.T`` in float32 as one wgmma of Hopper sums products of 8-bit floating-point numbers.

    The products of a dot product, and what was there before, are aligned to the largest exponent among them and cut
    off, towards zero, 13 bits below it. Their sum, which is exact, is cut off after 13 fraction bits. The exponent of
    a product is the sum of its factors' exponents: a product of 1.5 and 1.5 counts as one below 2.
    """
    parts = range(0, len(b), _COLUMNS)
    if len(parts) > 1:
        earlier = [None if before is None else before[:, i : i + _COLUMNS] for i in parts]
        pairs = zip(parts, earlier, strict=True)
        return np.concatenate([add_fp8_products(a, b[i : i + _COLUMNS], x, kinds) for i, x in pairs], 1)
    e_a, e_b = _exponents(a, kinds[0]).T, _exponents(b, kinds[1]).T
    exponent = (e_a[:, :, None] + e_b[:, None, :]).max(0).astype("i4")
    if before is not None:
        exponent = np.maximum(exponent, np.where(before == 0, _NOTHING, np.frexp(before)[1] - 1))
    unit = _unit(exponent)
    terms = np.ascontiguousarray(a.T)[:, :, None] * np.ascontiguousarray(b.T)[:, None, :]  # exact
    terms *= 1 / unit
    total = np.trunc(terms, out=terms).sum(0)  # sum of 33 integers, 32 of them below 2**15: exact
    if before is not None:
        total += np.trunc(before / unit)
    total *= unit
    unit = _unit(np.frexp(total)[1] - 1)
    return np.trunc(total / unit) * unit


def _exponents(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the exponents of 8-bit floating-point numbers; zero's is below all others."""
    exponent = np.maximum(np.frexp(values)[1] - 1, _LEAST_EXPONENT[kind])
    return np.where(values == 0, _NOTHING, exponent).astype("i2")


def _unit(exponent: np.ndarray) -> np.ndarray:
    """Return the last bit that is kept beside a number with an exponent."""
    return np.ldexp(np.float32(1), np.maximum(exponent - FP8_FRACTION_BITS, _LEAST_UNIT))
