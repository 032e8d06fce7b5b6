"""Which folder of tests takes how long: measured in a run, kept as a table in tests/README.md.

    python -m pytest -q -n 2 --dist worksteal --cpu-times=FILE [folders]
    python -m tests.durations FILE             # the rows of these folders anew, and the sum
    python -m tests.durations --compare FILE   # the table of a run; does the page's still agree?

Seconds are CPU time of the processes of the run and of their children (compilers), which a busy machine stretches far
less than the time of day. Imports and collection are not in it. Measure whole folders.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "tests" / "README.md"
HEAD = "| folder | tests | CPU seconds | share |\n|---|---|---|---|\n"
ALL = "all"
LIMIT = 2.0
"""By what factor the folders of a run may take longer or shorter, together, than the table says."""

_ROW = re.compile(r"\| `?([\w/]+)`? \| (\d+) \| (\d+) \| (\d+) % \|\n")


class Cost(NamedTuple):
    """Tests that ran, and the CPU seconds they took."""

    tests: int
    seconds: float


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def folder_of(path: str) -> str:
    """What a file counts for: the folder below `tests`, or `tests` itself."""
    folders = Path(path).parts[:-1]
    return "/".join(folders[: folders.index("tests") + 2])


class Recorder:
    """A plugin of pytest that adds to a file what this process's tests took, one line a process."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._tests: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """With fixtures, before and after."""
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            self._seconds[folder_of(item.nodeid.partition("::")[0])] += cpu_seconds() - start  # type: ignore[assignment]

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Not for tests that are skipped before they begin."""
        self._tests[folder_of(item.nodeid.partition("::")[0])] += 1

    def pytest_sessionfinish(self) -> None:
        """One line, at once: other processes write theirs."""
        found = {folder: (self._tests[folder], seconds) for folder, seconds in self._seconds.items()}
        if found:
            with open(self._file, "a") as file:
                file.write(json.dumps(found) + "\n")


def read(lines: Iterable[str]) -> dict[str, Cost]:
    """The sums over the processes of a run, or of several."""
    found: dict[str, Cost] = {}
    for line in lines:
        for folder, (tests, seconds) in json.loads(line).items():
            known = found.get(folder, Cost(0, 0.0))
            found[folder] = Cost(known.tests + tests, known.seconds + seconds)
    return found


def table_of(costs: dict[str, Cost]) -> str:
    """Longest first, in whole seconds; the last row is the sum of the others."""
    rows = [(folder, cost.tests, round(cost.seconds)) for folder, cost in costs.items()]
    rows.sort(key=lambda row: (-row[2], row[0]))
    total = sum(seconds for *_, seconds in rows)
    shown = [(f"`{folder}`", tests, seconds) for folder, tests, seconds in rows]
    shown.append((ALL, sum(tests for _, tests, _ in rows), total))
    lines = (
        f"| {name} | {tests} | {seconds} | {100 * seconds / max(1, total):.0f} % |\n" for name, tests, seconds in shown
    )
    return HEAD + "".join(lines)


def table_in(text: str) -> dict[str, Cost]:
    """The rows of the page's table, with its last one."""
    _, _, table = text.partition(HEAD)
    return {folder: Cost(int(tests), float(seconds)) for folder, tests, seconds, _ in _ROW.findall(table)}


def folders() -> Counter[str]:
    """How many files of tests each folder has."""
    files = (file for top in ("tests", "ptxsim/tests") for file in (REPOSITORY / top).rglob("test_*.py"))
    return Counter(folder_of(str(file.relative_to(REPOSITORY))) for file in files)


def with_table(text: str, costs: dict[str, Cost]) -> str:
    """The page with another table."""
    before, head, after = text.partition(HEAD)
    assert head, f"{PAGE} has no table that begins with {HEAD!r}"
    return before + table_of(costs) + _ROW.sub("", after)


def compare(measured: dict[str, Cost], known: dict[str, Cost]) -> str:
    """What is wrong with the table, in sum; "" if nothing."""
    common = measured.keys() & known.keys()
    now, then = (sum(costs[folder].seconds for folder in common) for costs in (measured, known))
    missing = sum(cost.seconds for folder, cost in measured.items() if folder not in known)
    if not then / LIMIT <= now <= then * LIMIT:
        return f"its folders took {now:.0f} s and not {then:.0f}"
    if missing > now / 10:
        return f"folders that it lacks took {missing:.0f} s: {', '.join(sorted(measured.keys() - known.keys()))}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by pytest --cpu-times=FILE")
    parser.add_argument("--compare", action="store_true", help="say whether the table still holds, and write nothing")
    options = parser.parse_args(argv)
    measured = read(line for file in options.files for line in file.read_text().splitlines())
    text = PAGE.read_text()
    known = {folder: cost for folder, cost in table_in(text).items() if folder in folders()}
    if options.compare:
        print(table_of(measured), end="")
        problem = compare(measured, known)
        if problem:
            print(f"{PAGE} is out of date, {problem}: python -m tests.durations FILE", file=sys.stderr)
        return 1 if problem else 0
    PAGE.write_text(with_table(text, {**known, **measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
