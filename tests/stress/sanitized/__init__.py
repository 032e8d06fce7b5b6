"""Small hostile calls of every kernel on a GPU, for compute-sanitizer; all are compared with the oracle:

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.stress.sanitized
compute-sanitizer --tool synccheck --error-exitcode 9 python -m tests.stress.sanitized cache topk
compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.stress.sanitized cache merge
compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.stress.sanitized --one-item records

There is a module for each family of kernels. racecheck is blind to two ways of being ordered, and reports hazards where
there are none: by an mbarrier on which one lane arrives for its warp, and by a named barrier on which threads arrive
without waiting. `--one-item` leaves out the calls in which a block has several work items, and so fills its stages
again; tests/README.md says where even so nothing can be concluded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call, whose results `run` compares with the oracle.

    `one_item` says that no block of any kernel has several work items on a GPU of 100 SMs or more.
    """

    name: str
    run: Callable[[], None]
    one_item: bool = True
