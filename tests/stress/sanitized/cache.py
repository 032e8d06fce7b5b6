"""The paged cache: append, gather, page copies, updates of tables; index keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.cache import runs
from tests.indexer.prepare import key_cache_cases
from tests.stress.sanitized import Call
from tests.support.gpu import fetch, upload

UPDATES = ((6, 5, 3), (3, 200, 64))


def calls() -> Iterator[Call]:
    """Every record, slots that name no token, pages further apart than they must."""
    for case in runs.CASES:
        yield Call(f"append and gather {case}", partial(runs.check_append_and_gather, case, upload, fetch))
    for shape in runs.COPIES:
        yield Call(f"copy pages {shape}", partial(runs.check_copy, shape, upload, fetch))
    for sizes in UPDATES:
        yield Call(f"update {sizes}", partial(runs.check_update, upload, fetch, sizes))
    for slots in runs.SLOTS_CASES:
        yield Call(f"slots {slots}", partial(runs.check_slots, slots, upload, fetch))
    for keys in key_cache_cases.CASES:
        yield Call(f"index keys {keys}", partial(key_cache_cases.check, keys, upload, fetch))
