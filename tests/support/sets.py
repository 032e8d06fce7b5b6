"""Cases that an ordinary run leaves to `-m slow`, unless a test decides case by case.

A test with the mark `one_in(n)` has many cases that reach the same code in other sizes, dtypes or modes. An ordinary
run has one in n of each kernel's; where kernels have fewer, one case for each four of them. They are those whose names
have the smallest checksums, so that neither another case nor another test changes the choice. On a GPU all of them run.

Of planted bugs an ordinary run has one in 12 of each test: of steps of synchronisation if there are some, since texts
are builds of their own.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.mutant_suite import Step
from tests.support.mutants import Mutant

PLANTED = 12


def mark_slow(items: Iterable[Any]) -> None:
    """Mark what an ordinary run leaves out."""
    tests = defaultdict[tuple[Any, str], list[Any]](list)
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        kept = {id(item) for item in ordinary(cases)}
        for item in cases:
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def ordinary(cases: Sequence[Any]) -> list[Any]:
    """Cases of one test in an ordinary run."""
    mark = cases[0].get_closest_marker("one_in")
    planted = [(item, bug) for item in cases if (bug := planted_in(item))]
    if planted:
        steps = [item for item, bug in planted if isinstance(bug, Step)]
        n = mark.args[0] if mark else PLANTED
        return one_in(n, steps or cases)
    if not mark:
        return list(cases)
    kernels = defaultdict[Any, list[Any]](list)
    for item in cases:
        kernels[parameters(item).get("kernel")].append(item)
    n = int(mark.args[0])
    few = [item for own in kernels.values() if len(own) < n for item in one_in(n, own)]
    return [*one_in(4, few), *(item for own in kernels.values() if len(own) >= n for item in one_in(n, own))]


def one_in(n: int, cases: Sequence[Any]) -> list[Any]:
    """Number that leaves at least one of them."""
    return sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))[: math.ceil(len(cases) / n)]


def planted_in(item: Any) -> Mutant | Step | None:
    """The bug that a case plants, if any."""
    return next((value for value in parameters(item).values() if isinstance(value, (Mutant, Step))), None)


def parameters(item: Any) -> dict[str, Any]:
    """Parameters of a case, by name."""
    found: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return found
