"""What callers pass to a cache, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_cupy.cache_formats import FORMATS, CacheFormat
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.ops.checks import check_count

MAX_SLOTS = 2**31 - 1
"""Slots are int32."""


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Check the sizes of a cache."""
    for argument, value in sizes.items():
        check_count(argument, value, 1, MAX_SLOTS)
    if sizes["num_pages"] * sizes["page_size"] > MAX_SLOTS:
        got = sizes["num_pages"] * sizes["page_size"]
        raise ArgumentError(explain("num_pages * page_size", got, f"at most {MAX_SLOTS}", "slots are int32"))


def record_of_pool(pool: str, record: Any) -> CacheFormat:
    """A record, or the one of a name."""
    found = FORMATS.get(record) if isinstance(record, str) else record
    if not isinstance(found, CacheFormat):
        raise ArgumentError(explain(f"pools[{pool!r}]", repr(record), f"a record: {', '.join(FORMATS)}"))
    return found


def vector(argument: str, given: Any, b: int) -> npt.NDArray[np.int64]:
    """A number for each of `b` sequences; one number is for all."""
    values = np.asarray(given)
    if values.ndim == 0 and values.dtype.kind in "iu":
        return np.full(b, int(values), np.int64)
    if values.shape != (b,) or (values.dtype.kind not in "iu" and b):
        raise ArgumentError(explain(argument, f"{values.dtype} {values.shape}", f"an integer, or {b} of them"))
    return values.astype(np.int64)


def tokens_of(tokens: Iterable[int] | None) -> npt.NDArray[np.int32]:
    """The tokens of a sequence; none are none."""
    given = np.asarray([] if tokens is None else tokens)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ArgumentError(explain("tokens", f"{given.dtype} {given.shape}", "a list of integers"))
    return given.astype(np.int32)
