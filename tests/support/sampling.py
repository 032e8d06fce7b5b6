"""Which cases of a test an ordinary run has, where they differ in sizes, the mode or the kernel and not in what they show.

Of a kernel that has changed, a test with the mark `sampled` has one of each four of its cases: first the first, then the
last, the third and the second, so that what takes turns over the cases (modes, dtypes, numbers of multiprocessors) goes
on to do so. Of each kernel it has others: where there are four, every case is run.

Of a kernel that is as it was (`unchanged.py`) it has one of each eight, and of each two such kernels with less than eight
cases one takes part: the other one in other tests.

`-m slow` has the rest, and `--sim=full` all at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import unchanged

SAMPLED = 4
SAMPLED_UNCHANGED = 8
_NONE = SimpleNamespace(params={})


def as_it_was(item: Any) -> bool:
    """Whether the kernel of a case has not changed; of a case that names none, any kernel of the tests' family."""
    kernel = getattr(item, "callspec", _NONE).params.get("kernel")
    if isinstance(kernel, str):
        return unchanged.kernel(kernel)
    folder, _, below = item.nodeid.partition("/")
    return folder == "tests" and unchanged.family(below.partition("/")[0])


def thin_out(items: Iterable[Any], still: Callable[[Any], bool] = as_it_was) -> None:
    """Make the other cases of sampled tests slow; `still` tells whether a case's kernel has not changed."""
    tests = dict[tuple[Any, str], list[Any]]()
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        kept = set(map(id, chosen(cases, still, zlib.crc32(name.encode()))))
        for item in cases:
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def chosen(cases: Sequence[Any], still: Callable[[Any], bool], first: int = 0) -> Iterator[Any]:
    """Those that an ordinary run has; of fewer than a block, the last if there is not the one whose turn it is.

    `first` is a number of the test: whose turn it is among the kernels that have not changed.
    """
    kernels = dict[Any, list[Any]]()
    for item in cases:
        kernels.setdefault(getattr(item, "callspec", _NONE).params.get("kernel"), []).append(item)
    few = [kernel for kernel, own in kernels.items() if len(own) < SAMPLED_UNCHANGED and still(own[0])]
    left_out = {kernel for i, kernel in enumerate(few) if len(few) > 1 and (first + i) % 2}
    for turn, (kernel, own) in enumerate(kernels.items()):
        if kernel in left_out:
            continue
        size = SAMPLED_UNCHANGED if still(own[0]) else SAMPLED
        for block, start in enumerate(range(0, len(own), size)):
            yield own[min(start + (turn - block) % size, len(own) - 1)]
