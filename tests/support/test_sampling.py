"""Sampled tests: each kernel keeps cases, and each case is kept for some kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import sampling


class Item:
    """What `thin_out` needs of a test."""

    def __init__(self, test: str = "test", *marks: str, **params: Any) -> None:
        self.parent, self.originalname, self.marks = "file", test, {*marks}
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, marker: Any) -> None:
        assert marker == pytest.mark.slow
        self.marks.add("slow")

    @property
    def runs(self) -> bool:
        return "slow" not in self.marks


def test_one_of_four_cases_of_a_sampled_test_runs_ordinarily() -> None:
    sampled = [Item("one", "sampled", case=i) for i in range(11)]
    others = [Item("other", case=i) for i in range(11)]
    sampling.thin_out([*sampled[:5], *others, *sampled[5:]])
    assert [i for i, item in enumerate(sampled) if item.runs] == [0, 7, 10]
    assert all(item.runs for item in others)


def test_kernels_share_the_cases() -> None:
    items = {(case, kernel): Item("one", "sampled", case=case, kernel=kernel) for case in range(5) for kernel in "abcd"}
    sampling.thin_out(items.values())
    assert [key for key, item in items.items() if item.runs] == [
        *[(0, "a"), (1, "b"), (2, "c"), (3, "d")],
        *[(4, "a"), (4, "b"), (4, "c"), (4, "d")],
    ]


def test_a_kernel_with_few_cases_keeps_one() -> None:
    few = [Item("one", "sampled", case=0, kernel=kernel) for kernel in "abc"]
    sampling.thin_out(few)
    assert all(item.runs for item in few)


def test_what_is_slow_already_takes_no_turn() -> None:
    items = [Item("one", "sampled", *marks, case=i) for i, marks in enumerate([["slow"], [], ["slow"], []])]
    sampling.thin_out(items)
    assert [item.runs for item in items] == [False, True, False, False]
