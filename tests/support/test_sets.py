"""An ordinary run has the same few cases of a test, whatever else there is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import mutants, sets
from tests.support.mutant_suite import Step
from tests.support.mutants import Mutant


class Item:
    """The parts of a test's case that `mark_slow` uses."""

    def __init__(self, n: int, test: str = "test", slow: bool = False, **parameters: Any) -> None:
        self.parent, self.originalname, self.n, self.slow = "file", test, n, slow
        self.name = f"{test}[{'-'.join(map(str, parameters.values()))}]"
        self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name: str) -> Any:
        if name == "gpu":
            return None
        if name == "slow":
            return self.slow
        return pytest.mark.one_in(self.n) if self.n else None

    def add_marker(self, marker: Any) -> None:
        assert marker == pytest.mark.slow
        self.slow = True


def left(items: list[Item]) -> list[str]:
    sets.mark_slow(items)
    return [item.name for item in items if not item.slow]


def cases(**more: Any) -> list[Item]:
    return [Item(4, kernel=kernel, case=case, **more) for kernel in "abc" for case in range(9)]


def test_one_in_four_of_each_kernel() -> None:
    kept = left(cases())
    assert [sum(f"[{kernel}-" in name for name in kept) for kernel in "abc"] == 3 * [math.ceil(9 / 4)]
    assert len(left([Item(8, kernel=kernel, case=case) for kernel in "abcd" for case in range(3)])) == 1
    assert left([Item(8, kernel="a", case=0)]) == ["test[a-0]"]
    assert len(left([Item(0, case=i) for i in range(5)])) == 5


def test_other_cases_and_tests_change_nothing() -> None:
    kept = left(cases())
    assert left(cases()[::-1]) == kept[::-1]
    assert [
        name for name in left([*cases(), *(Item(4, "other", case=i) for i in range(9))]) if "other" not in name
    ] == kept
    assert [name for name in left([*cases(), Item(4, kernel="d", case=0)]) if "[d" not in name] == kept


def test_what_is_slow_anyway_does_not_count() -> None:
    assert left([Item(4, case=0, slow=True), Item(4, case=1)]) == ["test[1]"]


def test_planted_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs by step: one in four, or as marked; by text: one in twelve, and none with bugs by step."""
    monkeypatch.setattr(mutants, "KNOWN", [])
    planted = [Step("a", "bar.sync", i, of=12) for i in range(12)]
    texts = [Mutant(f"text {i}", "a.cu", f"{i}", "") for i in range(13)]
    assert len(left([Item(0, mutant=mutant) for mutant in planted])) == 1
    assert len(left([Item(12, mutant=mutant) for mutant in planted])) == 1
    assert len(left([Item(0, mutant=mutant) for mutant in texts])) == 2
    kept = left([Item(0, mutant=mutant) for mutant in (*texts, *planted)])
    assert len(kept) == 1
    assert all("Step(" in name for name in kept)
