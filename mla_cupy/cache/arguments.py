"""Checks of the arguments of a cache."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import FORMATS, CacheFormat
from mla_cupy.errors import ArgumentError, DTypeError, explain, kind_of
from mla_cupy.ops.checks import check_count

MAX_SLOTS = 2**31 - 1
"""Slots are int32."""
_MAX_INT64 = 2**63 - 1


def check_sizes(given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a cache, as Python's numbers: NumPy's overflow."""
    sizes = {argument: check_count(argument, value, 1, MAX_SLOTS) for argument, value in given.items()}
    got = sizes["num_pages"] * sizes["page_size"]
    if got > MAX_SLOTS:
        raise ArgumentError(
            explain("num_pages * page_size", got, f"at most {MAX_SLOTS}", "make it smaller: slots are int32")
        )
    return sizes


def record_of_pool(pool: str, record: Any) -> CacheFormat:
    """A record, or the one of a name."""
    found = FORMATS.get(record) if isinstance(record, str) else record
    if not isinstance(found, CacheFormat):
        raise ArgumentError(explain(f"pools[{pool!r}]", repr(record), f"a record: {', '.join(FORMATS)}"))
    return found


def whole_numbers(argument: str, given: Any, expected: str) -> npt.NDArray[np.int64]:
    """Integers as an array of any rank: the numbers themselves, none of them wrapped around.

    Raises
    ------
    DTypeError
        If it is a masked array: the caller must decide if masked numbers count.
    ArgumentError
        If they are not integers, or one exceeds signed 64 bits.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise DTypeError(explain(argument, "a masked array", expected, "fill it, or pass its unmasked elements"))
    try:
        values = np.asarray(given)
    except Exception as error:  # whatever arrays of other libraries, and nested lists, raise
        got, remedy = kind_of(given), "it is read on the host: a list or an array of NumPy"
        raise ArgumentError(explain(argument, got, expected, remedy)) from error
    if values.dtype.kind not in "iu" and values.size:
        got = f"{values.dtype} {values.shape}" if isinstance(given, np.ndarray) else reprlib.repr(given)
        raise ArgumentError(explain(argument, got, expected))
    if values.dtype.kind == "u" and values.size and values.max() > _MAX_INT64:
        raise ArgumentError(explain(argument, int(values.max()), f"{expected}, of at most 2**63 - 1"))
    return values.astype(np.int64) if values.size else np.zeros(values.shape, np.int64)


def vector(argument: str, given: Any, b: int) -> npt.NDArray[np.int64]:
    """A number for each of `b` sequences; one number is for all."""
    expected = f"an integer, or {b} of them"
    values = whole_numbers(argument, given, expected)
    if values.ndim and values.shape != (b,):
        raise ArgumentError(explain(argument, f"{values.dtype} {values.shape}", expected))
    return values if values.ndim else np.full(b, values)


def tokens_of(tokens: Iterable[int] | None) -> npt.NDArray[np.int64]:
    """The tokens of a sequence; None becomes an empty array."""
    expected = "a list of integers"
    given = whole_numbers("tokens", [] if tokens is None else tokens, expected)
    if given.ndim != 1:
        raise ArgumentError(explain("tokens", f"{given.dtype} {given.shape}", expected))
    return given


def check_key(key: Any) -> None:
    """Check the key that separates prefixes."""
    if not isinstance(key, bytes):
        remedy = "encode text, as by key.encode()"
        raise ArgumentError(explain("key", repr(key), "bytes", remedy))
