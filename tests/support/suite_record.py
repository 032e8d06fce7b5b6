"""The record of which cases of FlashMLA's suites passed on which commit: tests/golden/flash_mla_suites.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

PASSED = "passed"


def numbers_of(ranges: str) -> set[int]:
    """{1, 2, 3, 7} for 1-3, 7."""
    spans = [part.partition("-") for part in ranges.split(",") if part.strip()]
    return {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)}


def ranges_of(numbers: Iterable[int]) -> str:
    """The opposite of `numbers_of`, in ascending order."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class Record:
    """A file with the number of cases of each suite, and the cases that passed by the commit they last ran on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, dict[str, dict[str, object]]]:
        return json.loads(self._path.read_text()) if self._path.exists() else {"suites": {}}

    def passed(self, suite: str) -> dict[str, set[int]]:
        """Cases by commit."""
        ranges = self._read()["suites"].get(suite, {PASSED: {}})[PASSED]
        assert isinstance(ranges, dict)
        return {commit: numbers_of(cases) for commit, cases in ranges.items()}

    def cases(self, suite: str) -> int:
        """How many cases a suite has."""
        cases = self._read()["suites"][suite]["cases"]
        assert isinstance(cases, int)
        return cases

    def rest(self, suite: str) -> list[int]:
        """The cases that passed on no commit."""
        passed = set[int]().union(*self.passed(suite).values())
        return sorted(set(range(1, self.cases(suite) + 1)) - passed)

    def write(self, commit: str, counts: Mapping[str, int], outcomes: Mapping[tuple[str, int], str]) -> None:
        """Cases move to the commit that they ran on; those that did not pass there stand nowhere."""
        known = self._read()
        for suite, cases in counts.items():
            ran = {n: outcome for (of, n), outcome in outcomes.items() if of == suite}
            by_commit = {old: kept - set(ran) for old, kept in self.passed(suite).items()}
            by_commit[commit] = by_commit.pop(commit, set()) | {n for n, what in ran.items() if what == PASSED}
            ranges = {old: ranges_of(kept) for old, kept in by_commit.items() if kept}
            known["suites"][suite] = {"cases": cases, PASSED: ranges}
        self._path.write_text(json.dumps(known, indent=2) + "\n")
