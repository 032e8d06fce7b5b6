"""What a run of the tests says of itself: how long it takes when it starts, what was skipped and why when it ends.

Reasons are counted, since thousands of tests are skipped for the same one: that there is no GPU. `-ra` lists each test.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from tests import durations

_PARTICULARS = re.compile(r"\d[\d.,]*( [KMGT]iB)?|'[^']*'|0x[0-9a-f]+")
MAX_REASONS = 25


def whole_run() -> str:
    """Return how long all tests take, by the table of tests/README.md."""
    measured = durations.table_in(durations.PAGE.read_text())[durations.ALL]
    minutes = math.ceil(measured.seconds / 2 / 60)
    return f"All tests: some {minutes} minutes on two idle cores without a GPU; tests/README.md has it by folder."


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, without pytest's prefix."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").strip() or "no reason given"


def counted(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """Return how often each reason was given, most often first.

    Reasons that differ in a number or a quoted name only are one, told in the words of the first.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = _PARTICULARS.sub("*", reason)
        first.setdefault(kind, reason)
        counts[kind] += 1
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], first[pair[0]]))
    return [(count, first[kind]) for kind, count in ranked]


def lines_of(reasons: Iterable[str]) -> list[str]:
    """Return what is printed at the end of a run."""
    found = counted(reasons)
    lines = [f"{count:6,}  {reason}" for count, reason in found[:MAX_REASONS]]
    rest = sum(count for count, _ in found[MAX_REASONS:])
    return [*lines, f"{rest:6,}  for {len(found) - MAX_REASONS} other reasons"] if rest else lines


class Skips:
    """A plugin of pytest, for the process that reports: with xdist, the one that distributes the tests."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Say how long it takes, if all tests run; a header would be silent with `-q`."""
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")  # not in processes of xdist
        if terminal is not None and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            terminal.write_line(whole_run())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Count what was skipped by reason."""
        skipped = terminalreporter.stats.get("skipped", [])
        if skipped:
            terminalreporter.section(f"{len(skipped):,} tests skipped (-ra lists them)")
            for line in lines_of(map(reason_of, skipped)):
                terminalreporter.line(line)
