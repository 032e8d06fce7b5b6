"""What a run of the tests says of itself: how long it takes when it starts, what was skipped and why when it ends.

Reasons are counted, since many tests are skipped for the same one. `-ra` lists each test. Thousands that need a GPU are
not even collected where there is none: to skip them took as long as 4,000 others take.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from mla_cupy.runtime import device
from tests import durations

_PARTICULARS = re.compile(r"\d[\d.,]*( [KMGT]iB)?|'[^']*'|0x[0-9a-f]+")
MAX_REASONS = 25
NO_GPU = "There is no GPU, so tests that need one are left out; with `-m gpu` they are skipped one by one."


def whole_run() -> str:
    """Return how long all tests take, by the table of tests/README.md."""
    measured = durations.table_in(durations.PAGE.read_text())[durations.ALL]
    minutes = math.ceil(measured.seconds / 2 / 60)
    return f"All tests: some {minutes} minutes on two idle cores without a GPU; tests/README.md has it by folder."


def without_gpu(config: pytest.Config) -> bool:
    """Return whether tests that need a GPU are left out: there is none, and nothing is said of them."""
    return "gpu" not in config.getoption("markexpr") and _gpus() == 0


@functools.cache
def _gpus() -> int:
    return device.gpu_count()


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
    """A plugin of pytest. With xdist, the process that distributes the tests reports, and the others collect."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Say how long it takes, if all tests run; a header would be silent with `-q`."""
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")  # not in processes of xdist
        if terminal is not None and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            terminal.write_line(whole_run())
            if without_gpu(session.config):
                terminal.write_line(NO_GPU)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """All tests of files of this name need a GPU; a file that the command line names is collected."""
        return True if collection_path.name.endswith("gpu.py") and without_gpu(config) else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Those of other files are told by their mark."""
        if not without_gpu(config):
            return
        left_out = [item for item in items if item.get_closest_marker("gpu") and not item.path.name.endswith("gpu.py")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            gone = set(map(id, left_out))
            items[:] = [item for item in items if id(item) not in gone]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Count what was skipped by reason."""
        skipped = terminalreporter.stats.get("skipped", [])
        if skipped:
            terminalreporter.section(f"{len(skipped):,} tests skipped (-ra lists them)")
            for line in lines_of(map(reason_of, skipped)):
                terminalreporter.line(line)
