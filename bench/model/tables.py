"""Tables of `bench model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def titled(title: str, *columns: str, left: int = 1) -> Table:
    """A table, its first columns aligned to the left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index == 0, overflow="fold")
    return table


def assumptions(*rates: Any) -> Table:
    """The rates of some records, with their sources."""
    table = titled("assumed of the GPU", "what", "value", "unit", "how sure", "source", left=5)
    for one in (row for record in rates for row in record.record()):
        table.add_row(one["name"], f"{one['value']:,}", one["unit"], one["confidence"], one["source"])
    return table
