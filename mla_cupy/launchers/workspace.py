"""How the parts of a workspace lie one behind the other."""

from __future__ import annotations

from collections.abc import Iterable

ALIGNMENT = 256
"""Of the workspace and of every part of it, in bytes."""


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes start, in bytes, and where the last one ends, padded like the others."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return found
