"""The record of FlashMLA's suites, and the tool's arithmetic with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.suite_record import Record, numbers_of, ranges_of

KEPT = Record(Path(__file__).parent / "golden" / "flash_mla_suites.json")


@settings(deadline=None, derandomize=True)
@given(st.sets(st.integers(1, 60)))
def test_ranges(numbers: set[int]) -> None:
    assert numbers_of(ranges_of(numbers)) == numbers


def test_ranges_are_short() -> None:
    assert ranges_of({7, 3, 1, 2, 8}) == "1-3, 7-8"


def test_case_moves_to_the_commit_that_it_ran_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json")
    record.write("old", {"dense": 5}, {("dense", n): "passed" for n in (1, 2, 3)})
    record.write("new", {"dense": 5}, {("dense", 2): "passed", ("dense", 3): "failed", ("sparse", 1): "passed"})
    assert record.passed("dense") == {"old": {1}, "new": {2}}
    assert record.rest("dense") == [3, 4, 5]


@pytest.mark.parametrize(("suite", "cases"), [("dense", 2352), ("sparse-decode", 4748), ("sparse-prefill", 617)])
def test_record_of_this_repository(suite: str, cases: int) -> None:
    """Each case stands at most once, and is a case of the suite."""
    assert KEPT.cases(suite) == cases
    listed = [n for passed in KEPT.passed(suite).values() for n in passed]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(range(1, cases + 1))
