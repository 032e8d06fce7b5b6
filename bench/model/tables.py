"""Tables of `bench model`."""

from __future__ import annotations

from typing import Any

from mla_cupy.terminal import Table


def titled(title: str, *columns: str, left: int = 1) -> Table:
    """A table, its first columns aligned to the left."""
    return Table(*columns, title=title, left=left)


def assumptions(*rates: Any) -> Table:
    """The rates of some records, with their sources."""
    table = titled("assumed of the GPU", "what", "value", "unit", "how sure", "source", left=5)
    for one in (row for record in rates for row in record.record()):
        table.add_row(one["name"], f"{one['value']:,}", one["unit"], one["confidence"], one["source"])
    return table
