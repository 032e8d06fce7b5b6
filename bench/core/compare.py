"""Two result files side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_cupy.terminal import Table

from .implementation import OWN
from .report import OK, microseconds
from .selection import Key, newest

if TYPE_CHECKING:
    from rich.console import Console

Rows = Mapping[Key, Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """One row in both files. The figures are microseconds, or their ratio to a peer's in the same run."""

    key: Key
    before: float | None
    after: float | None
    after_status: str

    @property
    def slowdown(self) -> float | None:
        """0.05 if the second file is 5% slower; negative if it is faster."""
        return self.after / self.before - 1 if self.before and self.after else None

    def fails(self, percent: float) -> bool:
        """True if the project's own row became slower than allowed or wrong, or is missing."""
        if self.key.implementation != OWN or self.before is None:
            return False
        return self.slowdown is None or self.slowdown * 100 > percent


def compare(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], relative_to: str | None = None
) -> list[Change]:
    """Every row of either file, in the first file's order.

    With `relative_to`, a figure is the time over that implementation's time for the same case in the same file:
    the only fair way to compare two runs on two machines, or on two days.
    """
    old, new = newest(before), newest(after)
    changes = []
    for key in dict.fromkeys((*old, *new)):
        status = new[key]["status"] if key in new else "missing"
        changes.append(Change(key, _figure(old, key, relative_to), _figure(new, key, relative_to), status))
    return changes


def _figure(rows: Rows, key: Key, relative_to: str | None) -> float | None:
    us = microseconds(rows[key]) if key in rows else None
    if us is None or relative_to is None:
        return us
    peer = rows.get(Key(key.case, relative_to))
    peer_us = microseconds(peer) if peer else None
    return us / peer_us if peer_us else None


def show(console: Console, changes: Sequence[Change], percent: float | None) -> None:
    """The table of changes."""
    which = ("operation", "case", "dtype", "record", "implementation")
    table = Table(*which, "before", "after", "change", "", left=len(which))
    for change in changes:
        slowdown = "-" if change.slowdown is None else f"{change.slowdown:+.1%}"
        remark = "" if change.after_status == OK else change.after_status
        if percent is not None and change.fails(percent):
            remark = (remark + " FAIL").strip()
        case = change.key.case
        which = case.op, case.case, case.dtype, case.record or "-", change.key.implementation
        table.add_row(*which, _text(change.before), _text(change.after), slowdown, remark)
    console.print(table)


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3f}"
