"""Parts of a timeline: its bars, the order of its tracks, and their colours."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = {"run": "#4c78a8", "wait": "#dddddd", "async": "#f58518", "phase": "#54a24b"}
"""One colour for each kind of span."""


@dataclass
class Span:
    """One bar: a track, a label, a kind (``run``, ``wait``, ``async`` or ``phase``) and its start and end.

    Asynchronous units belong to no block: theirs is ``()``.
    """

    block: tuple[int, ...]
    track: str
    label: str
    kind: str
    start: int
    end: int


def track_order(name: str) -> tuple[int, int, str]:
    """Sort warps by number, then barriers, then asynchronous units."""
    number = int(name.split()[-1]) if name.split()[-1].isdigit() else 0
    return (0 if name.startswith("warp") else 1 if name.startswith("mbarrier") else 2, number, name)
