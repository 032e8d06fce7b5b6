"""Contents of a call's arrays, for calls that run: numbers of any size, places that exist or are -1."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy import dtypes
from mla_cupy.errors import MlaError
from mla_cupy.export.subject import Array, Subject
from tests.export import draws
from tests.export.package import Call

Numbers = npt.NDArray[Any]
#: Sizes of random calls: small enough for a GPU's memory and for fifty calls in seconds.
LIMITS = {"b": 17, "n": 200, "s_q": 127, "s_kv": 1000, "num_pages": 64, "max_pages": 17, "extra_pages": 17}
LIMITS |= {"extra_page_size": 64, "extra_topk": 200, "max_position": 1000, "mask_bytes": 200}
LIMITS |= {"tables": 127, "ends": 127, "total_q": 127, "t": 200}
_SCALES_OF_V32 = slice(512, 528)
_LARGEST = 1 << 24
"""Elements of an array, at most."""


def call_of(subject: Subject, rng: random.Random, at: int = 1 << 40) -> Call:
    """A random call that the package takes, with contiguous arrays at made-up addresses."""
    for _ in range(100_000):
        values = draws.values(subject, rng, LIMITS)
        values |= draws.respaced(subject, values)
        values |= {array.name: at * (number + 1) for number, array in enumerate(subject.arrays)}
        call = Call(subject, values)
        if max(math.prod(shape_of(call, array)) for array in subject.arrays) <= _LARGEST and _is_taken(call):
            return call
    raise AssertionError("no draw is a call that the package takes")


def _is_taken(call: Call) -> bool:
    try:
        call.request()
    except MlaError:
        return False
    return True


def shape_of(call: Call, array: Array) -> tuple[int, ...]:
    """The shape of an array."""
    return tuple(call.size(axis) for axis in array.axes)


def contents(call: Call, array: Array, rng: np.random.Generator) -> Numbers:
    """The elements of an array, contiguous."""
    shape = shape_of(call, array)
    if array.dtype == "uint8":
        return _bytes(array.name, shape, rng)
    if array.dtype.startswith(("int", "uint")):
        draw = _INTEGERS[array.name] if not array.written else lambda *_: np.zeros(shape)
        return draw(call, shape, rng).astype(array.dtype)
    return np.asarray(dtypes.round_to(rng.standard_normal(shape), array.dtype)).astype(dtypes.numpy_dtype(array.dtype))


def _bytes(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Bits of a mask, or records: their codes and the halves of 16-bit numbers are finite, scales 1 or as they come."""
    found = rng.integers(0, 256, shape, np.uint8)
    if name == "mask":
        return found
    found &= 0xBF
    if shape[-1] == 656:
        found[..., _SCALES_OF_V32] = np.ones(4, np.float32).view(np.uint8)
    if shape[-1] == 132:
        found[..., 0, 128:] &= 0x3F
    return found


def _below(*axes: str, low: int = 0) -> Callable[..., Numbers]:
    """Integers from `low` up to the number of places that the product of the axes is."""

    def draw(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
        places = int(np.prod([call.size(axis) for axis in axes]))
        return rng.integers(min(low, places), max(places, 1) if low < 1 else places + 1, shape)

    return draw


def _up_to(*axes: str) -> Callable[..., Numbers]:
    """Lengths, 0 and all there is included."""

    def draw(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
        return rng.integers(0, int(np.prod([call.size(axis) for axis in axes])) + 1, shape)

    return draw


def _indices(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Rows or slots, some of them -1."""
    places = call.size("s_kv") or call.size("num_pages") * call.size("page_size")
    return rng.integers(-1, max(0, places), shape)


def _positions(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Rows of the tables, or any of 31 bits."""
    return rng.integers(0, max(1, call.values.get("max_position", 1 << 31)), shape)


def _slots(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Slots that differ, and -1: of two tokens in one slot either could stay."""
    places = call.size("num_pages") * call.size("page_size")
    found = np.full(shape, -1)
    count = min(places, *shape)
    found[:count] = rng.permutation(places)[:count]
    return rng.permutation(found)


def _starts(axis: str, packed: str = "") -> Callable[..., Numbers]:
    """Starts of sequences and the end of the last one, along an axis, or of `packed` if there is one."""

    def draw(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
        end = call.size(packed if packed in call.values else axis)
        cuts = np.sort(rng.integers(0, end + 1, shape))
        cuts[0], cuts[-1] = 0, end
        return cuts

    return draw


def _tree(call: Call, shape: tuple[int, ...], rng: np.random.Generator) -> Numbers:
    """Drafts that each draft sees: itself, and some earlier ones."""
    drafts = np.arange(shape[1], dtype=np.uint64)
    seen = rng.integers(0, 1 << 62, shape, np.uint64) & ((np.uint64(1) << drafts) - np.uint64(1))
    return seen | np.uint64(1) << drafts


_INTEGERS: dict[str, Callable[..., Numbers]] = {
    "block_table": _below("num_pages"),
    "seqlens": _up_to("max_pages", "page_size"),
    "tree_mask": _tree,
    "slots": _slots,
    "positions": _positions,
    "indices": _indices,
    "extra_indices": _below("extra_pages", "extra_page_size", low=-1),
    "topk_length": _up_to("topk"),
    "extra_topk_length": _up_to("extra_topk"),
    "cu_seqlens_q": _starts("s_q", "total_q"),
    "cu_seqlens_kv": _starts("s_kv"),
    "ke": _up_to("s_kv"),
    "ks": _up_to("s_kv"),
    "context_lens": _up_to("max_pages", "page_size"),
}
