"""TileLang, which has sparse MLA kernels that cannot be installed."""

from __future__ import annotations

from ..core.implementation import Implementation, NotAvailable


def tilelang() -> Implementation:
    """A row that says why there is none."""
    return NotAvailable(
        "tilelang", "TileLang's sparse MLA kernels are example scripts of its repository, not part of its wheel"
    )
