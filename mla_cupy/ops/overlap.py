"""Arrays that share memory: a written array must overlap neither itself nor any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType

import numpy as np

from mla_cupy.arrays.view import View
from mla_cupy.dtypes import TABLE
from mla_cupy.errors import ShapeError, explain

_MAX_WORK = 10_000
"""Work limit of NumPy's exact solver; arrays that it cannot tell apart within it count as overlapping."""

Span = tuple[int, int]
Beside = tuple[int, int, int]
"""The indices of a written array and another one, and how far the latter may begin after the former, in bytes."""


def check_apart(
    views: Mapping[str, View], written: Collection[str], in_place: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that the `written` arrays overlap neither themselves nor each other nor any array.

    One of them may be the very array that `in_place` names, laid out alike.

    Raises
    ------
    ShapeError
        That names the two.
    """
    for name in written:
        if name in views and _overlaps_itself(views[name]):
            remedy = "pass a separate array for each result"
            got = f"{views[name].strides} for {views[name].shape}"
            raise ShapeError(explain(f"{name}.strides", got, "elements that do not overlap each other", remedy))
    for (name, view), (other, theirs) in combinations(views.items(), 2):
        if (name in written or other in written) and _share(view, theirs):
            if in_place.get(other) == name and view == theirs:
                continue
            result, array = (name, other) if name in written else (other, name)
            remedy = "pass separate memory for each result"
            raise ShapeError(explain(result, f"memory that overlaps {array}", "memory of its own", remedy))


def spans(views: Sequence[View | None]) -> tuple[Span | None, ...]:
    """The bytes that arrays span, relative to their addresses; None for absent or empty ones."""
    found = [None if view is None else view.span(TABLE[view.dtype].nbytes) for view in views]
    return tuple(None if span is None or span[0] == span[1] else span for span in found)


def clearly_apart(
    addresses: Sequence[int], reach: Sequence[Span | None], written: Sequence[int], beside: Collection[Beside]
) -> bool:
    """True if no array of `written` (indices) comes near another one. Quick; False proves nothing.

    Pairs in `beside` may overlap.
    """
    present = [(at, addresses[at] + span[0], addresses[at] + span[1]) for at, span in enumerate(reach) if span]
    for index in written:
        span = reach[index]
        if span is None:
            continue
        begin, end = addresses[index] + span[0], addresses[index] + span[1]
        for other, low, high in present:
            if low >= end or begin >= high or other == index:
                continue
            if (index, other, addresses[other] - addresses[index]) not in beside:
                return False
    return True


def found_beside(addresses: Sequence[int], reach: Sequence[Span | None], written: Sequence[int]) -> set[Beside]:
    """The pairs that come near each other, of arrays that have passed `check_apart`."""
    found = set()
    for index in written:
        for other, theirs in enumerate(reach):
            two = [span if at in (index, other) else None for at, span in enumerate(reach)]
            if theirs is not None and other != index and not clearly_apart(addresses, two, [index], ()):
                found.add((index, other, addresses[other] - addresses[index]))
    return found


def are_alike(view: View | None, other: View | None) -> bool:
    """True if two arrays would be one, were they at one address."""
    return view is not None and other is not None and view._replace(ptr=0) == other._replace(ptr=0)


def _overlaps_itself(view: View) -> bool:
    """True if elements may share memory: each stride must reach past all that the smaller ones cover."""
    if 0 in view.shape:
        return False
    axes = sorted((abs(stride), size) for stride, size in zip(view.strides, view.shape, strict=True) if size > 1)
    covered = 0
    for stride, size in axes:
        if stride <= covered:
            return True
        covered += stride * (size - 1)
    return False


def _share(view: View, other: View) -> bool:
    (low, high), (their_low, their_high) = (x.span(TABLE[x.dtype].nbytes) for x in (view, other))
    if low == high or their_low == their_high:
        return False
    if other.ptr + their_low >= view.ptr + high or view.ptr + low >= other.ptr + their_high:
        return False
    try:
        return bool(np.shares_memory(_shadow(view), _shadow(other), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _shadow(view: View) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """An array with the same addresses, never to be read: they may be a GPU's."""
    itemsize = TABLE[view.dtype].nbytes

    class Interface:
        __array_interface__ = {  # noqa: RUF012
            "data": (view.ptr, True),
            "shape": view.shape,
            "strides": tuple(itemsize * stride for stride in view.strides),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }

    return np.asarray(Interface())
