"""Which cases of a test an ordinary run has, where they differ in sizes or the mode and not in the code they reach.

A test with the mark `sampled` has each third of them: of each kernel, or place, another third, so that where there are
three every case is run. Threes are out of step with the four modes, the dtypes and the numbers of multiprocessors,
which take turns over the cases. `-m slow` has the others, and `--sim=full` all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

SAMPLED = 3
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
    """Each third case of each kernel and place, from the first, the second or the third on; of few, the first."""
    groups = dict[Any, list[Any]]()
    for item in cases:
        params = getattr(item, "callspec", _NONE).params
        groups.setdefault(tuple(params.get(name) for name in ("kernel", "place")), []).append(item)
    for turn, own in enumerate(groups.values()):
        yield from own[turn % SAMPLED :: SAMPLED] or own[:1]
