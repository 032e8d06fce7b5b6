"""A timeline as a few lines of text: one lane for each warpgroup of a block and each kind of asynchronous work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

WARPS = 4
"""Warps of a warpgroup, which a lane shows together."""
_DENSE = 0.5
_AT_WORK, _NOW_AND_THEN, _WAITING = "#", "-", " "

Block = tuple[int, ...]


def busiest_block(spans: Iterable[Any]) -> Block:
    """Return the block whose warps executed the most."""
    executed: dict[Block, int] = {}
    for span in spans:
        if span.kind == "run":
            executed[span.block] = executed.get(span.block, 0) + span.end - span.start
    return max(executed, key=lambda block: executed[block])


def extent(spans: Iterable[Any], block: Block) -> tuple[int, int]:
    """Return the first and the last moment of a block, in executed basic blocks."""
    own = [span for span in spans if span.block == block]
    return min(span.start for span in own), max(span.end for span in own)


def lanes(spans: Sequence[Any], block: Block, width: int) -> dict[str, str]:
    """Return the lanes of a block by name, each `width` characters long.

    Parameters
    ----------
    spans : sequence of ptxsim spans
        Spans of one launch with blocks run one after another, so that everything in flight belongs to the block.
    block : tuple of int
    width : int
    """
    begin, end = extent(spans, block)
    runs = [span for span in spans if span.block == block and span.kind == "run"]
    flights = [span for span in spans if span.kind == "async" and begin <= span.start < end]

    groups: dict[str, list[Any]] = {}
    for span in sorted(runs, key=_warp):
        first = _warp(span) // WARPS * WARPS
        groups.setdefault(f"warps {first}-{first + WARPS - 1}", []).append(span)
    for span in flights:
        groups.setdefault(f"{span.track} in flight", []).append(span)
    return {name: _lane(own, begin, end, width) for name, own in groups.items()}


def _lane(spans: Iterable[Any], begin: int, end: int, width: int) -> str:
    return "".join(map(_character, _shares(spans, begin, end, width)))


def _warp(span: Any) -> int:
    return int(span.track.removeprefix("warp "))


def _shares(spans: Iterable[Any], begin: int, end: int, width: int) -> list[float]:
    """Return the share of each column of time that the spans cover; overlaps count more than once."""
    column = (end - begin) / width
    covered = [0.0] * width
    for span in spans:
        first = int((span.start - begin) / column)
        for index in range(first, min(width, 1 + int((span.end - begin) / column))):
            left = begin + index * column
            covered[index] += max(0.0, min(span.end, left + column) - max(span.start, left))
    return [time / column for time in covered]


def _character(share: float) -> str:
    return _AT_WORK if share >= _DENSE else _NOW_AND_THEN if share > 0 else _WAITING
