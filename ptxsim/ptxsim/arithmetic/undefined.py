"""Undefined bits of values: masks of lanes that also know the bits, for instructions that move bits.

A poison mask (:data:`~.numeric.Poison`) is an array of 32 booleans as a rule: the whole value of a lane is undefined.
Instructions that move single bits, and loads of memory some of whose bytes are undefined, make :class:`Bits` instead.
Arithmetic on such a mask yields plain masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from .numeric import Poison, count_nonzero

UNWRITTEN = np.ones(32, bool)
"""The mask of registers that were never written."""


class Bits(np.ndarray):
    """A mask of lanes with the undefined bits of each lane's value, unsigned (None: all bits)."""

    bits: np.ndarray | None = None

    @property
    def whole(self) -> np.ndarray:
        """The mask of lanes alone."""
        return self.view(np.ndarray)


def _known(mask: Poison) -> np.ndarray | None:
    """Return the undefined bits that a mask knows."""
    return mask.bits if isinstance(mask, Bits) else None


def of_bits(bits: np.ndarray) -> Poison:
    """Return the mask of undefined bits."""
    if not count_nonzero(bits):
        return None
    if bits.dtype == bool:
        return bits
    mask = (bits != 0).view(Bits)
    mask.bits = bits
    return mask


def bits_of(mask: Poison, value: np.ndarray) -> np.ndarray:
    """Return the undefined bits of a value.

    A mask of a narrower value belongs to one that has been extended: the new bits are as undefined as its highest.
    """
    kind = value.dtype
    if kind.kind == "b":
        return np.zeros(len(value), bool) if mask is None else np.asarray(mask)
    signed, unsigned = f"i{kind.itemsize}", f"u{kind.itemsize}"
    if mask is None:
        return np.zeros(len(value), unsigned)
    bits = _known(mask)
    if bits is None:
        return np.where(mask, -1, 0).astype(signed).view(unsigned)
    return bits.view(f"i{bits.dtype.itemsize}").astype(signed).view(unsigned)


def narrowed(mask: np.ndarray, value: np.ndarray) -> Poison:
    """Return the mask of a value, which may be the low part of the mask's value."""
    return mask if _known(mask) is None else of_bits(bits_of(mask, value))


def of_bytes(defined: np.ndarray) -> Poison:
    """Return the mask of values in memory whose bytes hold 1 where they are defined."""
    ones = defined.dtype.type(int.from_bytes(b"\1" * defined.dtype.itemsize, "little"))
    return of_bits((defined ^ ones) * defined.dtype.type(255))


def bytes_of(mask: Poison, value: np.ndarray) -> np.ndarray:
    """Return a value's definedness for memory: a byte of it is 1 where all its bits are defined."""
    bits = np.ascontiguousarray(bits_of(mask, value))
    return (bits.view("u1") == 0).view(f"u{value.dtype.itemsize}")


def select(pred: np.ndarray, new: Poison, old: Poison) -> Poison:
    """Return the mask of ``where(pred, new, old)``."""
    if new is None and old is None:
        return None
    known = [bits for bits in map(_known, (new, old)) if bits is not None]
    if not known:
        mask = np.where(pred, False if new is None else new, False if old is None else old)
        return mask if count_nonzero(mask) else None
    like = max(known, key=lambda bits: bits.dtype.itemsize)
    return of_bits(np.where(pred, bits_of(new, like), bits_of(old, like)))


def part(mask: np.ndarray, lanes: np.ndarray) -> Poison:
    """Return the mask of some lanes."""
    bits = _known(mask)
    if bits is not None:
        return of_bits(bits[lanes])
    some = mask[lanes]
    return some if count_nonzero(some) else None


def put(old: Poison, lanes: np.ndarray, new: Poison) -> Poison:
    """Return the mask of a value some of whose lanes are replaced."""
    if old is None and new is None:
        return None
    taken = np.zeros(32, bool)
    taken[lanes] = True
    known = _known(new)
    spread: Poison = None
    if known is not None:
        bits = np.zeros(32, known.dtype)
        bits[lanes] = known
        spread = of_bits(bits)
    elif new is not None:
        spread = np.zeros(32, bool)
        spread[lanes] = new
    return select(taken, spread, old)


def moved(function: Callable, count: int = 1) -> Callable[..., Poison]:
    """Return the mask of a function that moves the bits of its first ``count`` arguments as the other arguments say.

    The mask's arguments are the function's, each followed by its own mask.
    """

    def mask(*pairs: np.ndarray) -> Poison:
        values, masks = pairs[::2], pairs[1::2]
        places = [bits_of(q, x).view(x.dtype) for x, q in zip(values[:count], masks[:count], strict=True)]
        result = np.ascontiguousarray(function(*places, *values[count:]))
        bits = result.view(f"u{result.dtype.itemsize}")
        for q in masks[count:]:
            if q is not None:
                bits = np.where(q, np.iinfo(bits.dtype).max, bits).astype(bits.dtype)
        return of_bits(bits)

    return mask


def repacked(function: Callable) -> Callable[..., Poison]:
    """Return the mask of a function that only packs its arguments, or takes one apart.

    A mask of all lanes may be the mark of results in flight. Whoever waits for them looks for that very object.
    """

    def mask(*pairs: np.ndarray) -> Poison:
        for each in pairs[1::2]:
            if each is not None and each.__class__ is not Bits and each is not UNWRITTEN and each.all():
                return each
        return moved(function, len(pairs) // 2)(*pairs)

    return mask


@functools.cache
def logic(table: int, same: tuple[int, ...]) -> Callable[..., Poison]:
    """Return the mask of a bitwise function of a truth table, the last argument its lowest index bit.

    Parameters
    ----------
    table : int
        Bit i is the result for arguments that form the bits of i.
    same : tuple of int
        For each argument the first one that is the same register: ``x ^ x`` is zero whatever x is.
    """
    count = len(same)
    rows = [tuple(i >> (count - 1 - k) & 1 for k in range(count)) for i in range(1 << count)]
    possible = [
        (row, table >> i & 1) for i, row in enumerate(rows) if all(row[k] == row[same[k]] for k in range(count))
    ]

    def mask(*pairs: np.ndarray) -> Poison:
        can = []
        for x, q in zip(pairs[::2], pairs[1::2], strict=True):
            undefined = bits_of(q, x)
            can.append((undefined | ~x, undefined | x))
        results = [np.zeros_like(can[0][0]), np.zeros_like(can[0][0])]
        for row, value in possible:
            results[value] |= functools.reduce(np.bitwise_and, (can[k][bit] for k, bit in enumerate(row)))
        return of_bits(results[0] & results[1])

    return mask
