"""Search for sequences of a batch with a shared prefix that is worth a separate call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_cupy.errors import ArgumentError, DTypeError, ShapeError, explain, kind_of
from mla_cupy.ops.checks import check_count, check_flag, is_integer
from mla_cupy.runtime import device as devices
from mla_cupy.shapes import MAX_INT32, TILE_TOKENS

__all__ = ["PrefixGroup", "shared_prefixes"]

Array = npt.NDArray[np.integer[Any]]

_THRESHOLDS = 16
"""Number of lengths of shared prefixes that are tried as the shortest of a group."""

# Costs of the model, in microseconds on an H200. docs/guides/paged-cache.md has the measurements.
_TILE_US = 1.6
"""A tile of 64 tokens for 64 query rows."""
_SMALL_TILE_US, _SMALL_ROW_US = 1.0, 0.018
"""A tile for up to 32 rows, which many sequences read from the L2; and for each of the rows."""
_SMALL_ROWS = 32
_GROUP_US = 33.0
"""Time that a group adds to a call without a plan, in us: a kernel, two schedules, two merges. With a plan: 24."""
_ASSUMED_SMS = 132


class PrefixGroup(NamedTuple):
    """Sequences [first, first + sequences) of a batch that share their first `pages` pages."""

    first: int
    sequences: int
    pages: int


def shared_prefixes(
    block_table: Array,
    seqlens: Array,
    *,
    page_size: int,
    h_q: int,
    s_q: int = 1,
    always: bool = False,
    device: int | None = None,
) -> tuple[PrefixGroup, ...]:
    """Find neighbours in a batch with shared prefixes that are worth a separate call.

    Parameters
    ----------
    block_table : numpy.ndarray, (b, max_pages), integers
        The pages of each sequence, on the host. Sequences that share a prefix must be neighbours.
    seqlens : numpy.ndarray, (b,), integers
        Tokens of each sequence, the query tokens included; on the host.
    page_size, h_q, s_q : int
        As in the calls of `cascade_decode`.
    always : bool
        Return every prefix of a page or more that two neighbours share. Default: only those that make the call faster,
        by a model of the GPU.
    device : int, optional
        CUDA ordinal of the GPU to model. Default: a GPU with 132 multiprocessors.

    Returns
    -------
    tuple of PrefixGroup
        Disjoint, in the order of the batch; empty if no group pays off.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError

    Notes
    -----
    Only whole pages that every query token sees count. Where some neighbours share more pages than all of them do, the
    groups with the largest savings are chosen, each with one prefix.

    Examples
    --------
    >>> import numpy as np, mla_cupy
    >>> table = np.array([[7, 3, 1, 0], [7, 3, 2, 0], [7, 3, 4, 5], [6, 0, 0, 0]])
    >>> mla_cupy.shared_prefixes(table, np.array([40, 33, 64, 9]), page_size=16, h_q=16, always=True)
    (PrefixGroup(first=0, sequences=3, pages=2),)
    """
    table, lengths = _integers("block_table", block_table), _integers("seqlens", seqlens)
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        got = f"{table.shape} and {lengths.shape}"
        raise ShapeError(explain("block_table.shape and seqlens.shape", got, "(b, max_pages) and (b,)"))
    sizes = (("page_size", page_size), ("h_q", h_q), ("s_q", s_q))
    page_size, h_q, s_q = (check_count(argument, value, 1, MAX_INT32) for argument, value in sizes)
    always = check_flag("always", always)
    if device is not None and not (is_integer(device) and device >= 0):
        raise ArgumentError(explain("device", repr(device), "a CUDA ordinal, or None"))
    if len(table) < 2:
        return ()
    common = _common_pages(table, np.clip((lengths - s_q + 1) // page_size, 0, table.shape[1]))
    sms = _ASSUMED_SMS if device is None else devices.describe(device).sm_count
    rows = s_q * h_q
    found: tuple[float, tuple[PrefixGroup, ...]] = (0.0, ())
    candidates = np.unique(common[common > 0])
    for least in candidates[np.linspace(0, len(candidates) - 1, min(len(candidates), _THRESHOLDS)).astype(int)]:
        groups, saved = [], 0.0
        for group in _runs(common, int(least)):
            gain = _saved_us(group, rows, page_size, sms)
            if always or gain > 0:
                groups.append(group)
                saved += group.pages * (group.sequences - 1) if always else gain
        found = max(found, (saved, tuple(groups)))
    return found[1]


def _integers(argument: str, x: Any) -> Array:
    """An array of the host as NumPy's; raises DTypeError unless it has integers."""
    if isinstance(x, np.ma.MaskedArray) or not isinstance(x, (np.ndarray, list, tuple)):
        raise DTypeError(explain(argument, kind_of(x), "a NumPy array of integers", "copy it to the host"))
    try:
        array = np.asarray(x)
    except ValueError:  # of lists of several lengths
        array = np.asarray(x, object)
    if array.dtype.kind not in "iu" and array.size:
        raise DTypeError(explain(f"{argument}.dtype", array.dtype, "integers"))
    return array.astype(np.int64)


def _common_pages(table: Array, limits: Array) -> Array:
    """Number of first pages that each sequence shares with the next one, as far as both are full and seen."""
    width = table.shape[1]
    differs = np.concatenate([table[:-1] != table[1:], np.ones((len(table) - 1, 1), bool)], axis=1)
    common: Array = np.minimum(np.minimum(differs.argmax(axis=1), width), np.minimum(limits[:-1], limits[1:]))
    return common


def _runs(common: Array, least: int) -> list[PrefixGroup]:
    """The longest runs of neighbours that share at least `least` pages, and the pages that a whole run shares."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (common >= least).astype(int), [0]])))
    return [
        PrefixGroup(int(first), int(end - first) + 1, int(common[first:end].min()))
        for first, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _saved_us(group: PrefixGroup, rows: int, page_size: int, sms: int) -> float:
    """Time that a separate call for the group's prefix saves, by the model."""
    tiles = group.pages * page_size / TILE_TOKENS / sms
    blocks = -(-rows // TILE_TOKENS)
    alone = _SMALL_TILE_US + _SMALL_ROW_US * rows if rows <= _SMALL_ROWS else _TILE_US * blocks
    together = _TILE_US * -(-group.sequences * rows // TILE_TOKENS)
    return tiles * (group.sequences * alone - together) - _GROUP_US


def check_groups(groups: Any, b: int, max_pages: int) -> tuple[PrefixGroup, ...]:
    """Check that groups are disjoint, in the order of a batch, and have at most `max_pages` pages.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(groups, (list, tuple)):
        raise ArgumentError(explain("groups", repr(groups), "a sequence of PrefixGroup", "see `shared_prefixes`"))
    end, checked = 0, []
    for number, group in enumerate(groups):
        argument = f"groups[{number}]"
        if not (isinstance(group, (list, tuple)) and len(group) == 3 and all(map(is_integer, group))):
            raise ArgumentError(explain(argument, repr(group), "a PrefixGroup: three integers"))
        first, count, pages = (int(value) for value in group)
        if not (end <= first and count >= 1 and first + count <= b):
            got = f"sequences [{first}, {first + count})"
            raise ArgumentError(explain(argument, got, f"sequences within [{end}, {b}), after the group before"))
        if not 1 <= pages <= max_pages:
            raise ArgumentError(explain(f"{argument}.pages", pages, f"1 to max_pages = {max_pages}"))
        end = first + count
        checked.append(PrefixGroup(first, count, pages))
    return tuple(checked)
