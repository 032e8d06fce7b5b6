"""What a run of the tests says of itself: how long it takes when it starts, what was skipped and why when it ends.

Reasons are counted, since many tests are skipped for the same one. `-ra` lists each test. Thousands that need a GPU are
not even collected where there is none: to skip them took as long as 4,000 others take. Nor does a run of all tests make
items of long forms, which it would deselect: they were half of the 54,000 that each process made.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

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


def left_out(config: pytest.Config) -> set[str]:
    """Return the marks of tests that are left out before they are collected, in a run of all tests.

    Long forms are if it does not want them. Elsewhere they are deselected: who names one is told so.
    """
    if not _is_whole(config):
        return set()
    wanted = config.getoption("markexpr")
    slow = {"slow"} if "slow" in wanted and "slow" not in wanted.replace("not slow", "") else set[str]()
    return slow | ({"gpu"} if without_gpu(config) else set())


def _is_whole(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


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


def without(marks: Collection[str], values: Iterable[object]) -> list[object]:
    """Return the parameters of a test without those that have one of the marks, if some are left.

    All are returned if one has neither a name nor a value that names it: pytest would give it a number, and others
    change the number.
    """
    found = list(values)
    kept = [value for value in found if all(mark.name not in marks for mark in getattr(value, "marks", ()))]
    return kept if kept and all(map(_has_a_name, found)) else found


def _has_a_name(value: object) -> bool:
    values = getattr(value, "values", value)
    return bool(getattr(value, "id", None)) or all(
        isinstance(each, (str, int, float, type(None))) for each in (values if isinstance(values, tuple) else (values,))
    )


class Skips:
    """A plugin of pytest. With xdist, the process that distributes the tests reports, and the others collect."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Say how long it takes, if all tests run; a header would be silent with `-q`."""
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")  # not in processes of xdist
        if terminal is not None and _is_whole(session.config):
            terminal.write_line(whole_run())
            if without_gpu(session.config):
                terminal.write_line(NO_GPU)

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """All tests of files of this name need a GPU; a file that the command line names is collected."""
        return True if collection_path.name.endswith("gpu.py") and without_gpu(config) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
        """Make no item of a test that is left out whatever its parameters are."""
        marks = {mark.name for mark in obj.pytestmark} if callable(obj) and hasattr(obj, "pytestmark") else set()
        return [] if marks & left_out(collector.config) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make none of the parameters that are left out."""
        marks, parametrize = left_out(metafunc.config), metafunc.parametrize

        def shorter(names: Any, values: Iterable[object], *rest: Any, **options: Any) -> None:
            parametrize(names, values if rest or options.get("ids") else without(marks, values), *rest, **options)

        if marks:
            metafunc.parametrize = shorter  # type: ignore[method-assign]

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
