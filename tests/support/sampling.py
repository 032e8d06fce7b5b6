"""Which cases of a test an ordinary run has, where they differ in sizes, the mode or the kernel, not in what they show.

A test with the mark `sampled` has one of each four of its cases: first the first, then the last, the third and the
second, so that what takes turns over the cases (modes, dtypes, numbers of multiprocessors) goes on to do so. Of each
kernel it has others: where there are four, every case is run. Of a kernel that has not changed (`unchanged.py`) it has
one of each eight, and of each two such kernels with less than eight cases one takes part: the other one in other tests.

A test with the mark `settled` has all cases of a kernel that has changed. Of one that has not, it has one of each four,
and of each two such kernels with less than four one takes part.

`-m slow` has the rest, and `--sim=full` all at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import unchanged

ONE_OF = {"sampled": (4, 8), "settled": (1, 4)}
"""By mark: of how many cases of a kernel there is one, of a kernel that has changed and of one that has not."""
_NONE = SimpleNamespace(params={})


def as_it_was(item: Any) -> bool:
    """Whether the kernel of a case has not changed; of a case that names none, any kernel of the tests' family.

    Never on a GPU, which may be another one, or have another driver.
    """
    if item.get_closest_marker("gpu"):
        return False
    kernel = getattr(item, "callspec", _NONE).params.get("kernel")
    if isinstance(kernel, str):
        return unchanged.kernel(kernel)
    folder, _, below = item.nodeid.partition("/")
    return folder == "tests" and unchanged.family(below.partition("/")[0])


def thin_out(items: Iterable[Any], still: Callable[[Any], bool] = as_it_was) -> None:
    """Make the other cases of such tests slow; `still` tells whether a case's kernel has not changed."""
    tests = dict[tuple[Any, str, str], list[Any]]()
    for item in items:
        mark = next(filter(item.get_closest_marker, ONE_OF), "")
        if mark and not item.get_closest_marker("slow"):
            tests.setdefault((item.parent, item.originalname, mark), []).append(item)
    for (_, name, mark), cases in tests.items():
        kept = set(map(id, chosen(cases, ONE_OF[mark], still, zlib.crc32(name.encode()))))
        for item in cases:
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def chosen(
    cases: Sequence[Any], one_of: tuple[int, int], still: Callable[[Any], bool], first: int = 0
) -> Iterator[Any]:
    """Those that an ordinary run has; of fewer than a block, the last if there is not the one whose turn it is.

    `first` is a number of the test: whose turn it is among the kernels that have not changed.
    """
    kernels = dict[Any, list[Any]]()
    for item in cases:
        kernels.setdefault(getattr(item, "callspec", _NONE).params.get("kernel"), []).append(item)
    sizes = {kernel: one_of[still(own[0])] for kernel, own in kernels.items()}
    few = [kernel for kernel, own in kernels.items() if len(own) < sizes[kernel] == one_of[1]]
    left_out = {kernel for i, kernel in enumerate(few) if len(few) > 1 and (first + i) % 2}
    for turn, (kernel, own) in enumerate(kernels.items()):
        if kernel not in left_out:
            for block, start in enumerate(range(0, len(own), sizes[kernel])):
                yield own[min(start + (turn - block) % sizes[kernel], len(own) - 1)]
