"""Which cases of a test an ordinary run has, where they differ in sizes or the mode and not in the code they reach.

A test with the mark `sampled` has one of each four of them: first the first, then the last, the third and the second,
so that what takes turns over the cases (modes, dtypes, numbers of multiprocessors) goes on to do so. Of each kernel it
has others: where there are four, every case is run. `-m slow` has the rest, and `--sim=full` all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

SAMPLED = 4
_NONE = SimpleNamespace(params={})


def thin_out(items: Iterable[Any]) -> None:
    """Make the other cases of sampled tests slow."""
    tests = dict[tuple[Any, str], list[Any]]()
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        kept = set(map(id, chosen(cases)))
        for item in cases:
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def chosen(cases: Sequence[Any]) -> Iterator[Any]:
    """One of each four of each kernel; of fewer, the last if there is not the one whose turn it is."""
    kernels = dict[Any, list[Any]]()
    for item in cases:
        kernels.setdefault(getattr(item, "callspec", _NONE).params.get("kernel"), []).append(item)
    for turn, own in enumerate(kernels.values()):
        for block, start in enumerate(range(0, len(own), SAMPLED)):
            yield own[min(start + (turn - block) % SAMPLED, len(own) - 1)]
