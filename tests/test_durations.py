"""The table of durations in tests/README.md adds up, and is written from what a run measures."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests import durations
from tests.durations import ALL, Cost

MEASURED = ['{"tests/a": [2, 3.4], "tests/b": [1, 10.0]}', '{"tests/a": [5, 6.0]}']


def test_the_table_adds_up() -> None:
    """A row that was typed, or merged from two branches, shows."""
    text = durations.PAGE.read_text()
    rows = durations.table_in(text)
    assert rows
    total = rows.pop(ALL)
    assert total == (sum(cost.tests for cost in rows.values()), sum(cost.seconds for cost in rows.values()))
    assert durations.with_table(text, rows) == text
    assert total.seconds > 0


def test_the_table_has_no_folder_that_is_no_more() -> None:
    """One that is new shows in `--compare`, by the time that it takes."""
    rows = durations.table_in(durations.PAGE.read_text())
    assert rows.keys() - {ALL} <= durations.folders().keys()


def test_sums_over_the_processes_of_a_run() -> None:
    found = durations.read(MEASURED)
    assert found == {"tests/a": (7, pytest.approx(9.4)), "tests/b": (1, 10.0)}
    rows = durations.table_in(durations.table_of(found))
    assert rows == {"tests/b": (1, 10), "tests/a": (7, 9), ALL: (8, 19)}


def test_rows_are_replaced_and_the_text_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "README.md", tmp_path / "times"
    known = {"tests/decode": Cost(3, 30.0), "tests/merge": Cost(4, 9.0), "tests/no_more": Cost(1, 1.0)}
    page.write_text(f"before\n\n{durations.table_of(known)}\nafter\n")
    file.write_text('{"tests/merge": [5, 70.2]}\n')
    monkeypatch.setattr(durations, "PAGE", page)
    assert durations.main([str(file)]) == 0
    expected = {"tests/merge": Cost(5, 70.2), "tests/decode": Cost(3, 30.0)}
    assert page.read_text() == f"before\n\n{durations.table_of(expected)}\nafter\n"


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        ({"a": 10, "b": 20}, ""),
        ({"a": 19, "b": 39}, ""),
        ({"a": 21, "b": 40}, "took 61 s and not 30"),
        ({"a": 4, "b": 10}, "took 14 s and not 30"),
        ({"a": 9}, ""),
        ({"a": 10, "b": 20, "new": 2}, ""),
        ({"a": 10, "b": 20, "new": 4}, "lacks took 4 s: new"),
    ],
)
def test_the_table_holds_in_sum(measured: dict[str, int], problem: str) -> None:
    costs = {folder: Cost(1, seconds) for folder, seconds in measured.items()}
    found = durations.compare(costs, {"a": Cost(1, 10), "b": Cost(1, 20)})
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_run_writes_what_its_tests_take(this_test: pytest.Item, tmp_path: Path) -> None:
    file = tmp_path / "times"
    recorder = durations.Recorder(str(file))
    around = recorder.pytest_runtest_protocol(this_test)
    next(around)
    recorder.pytest_runtest_call(this_test)
    start = durations.cpu_seconds()
    for _ in itertools.takewhile(lambda _: durations.cpu_seconds() < start + 0.1, itertools.count()):
        pass
    with pytest.raises(StopIteration):
        next(around)
    recorder.pytest_sessionfinish()
    ((folder, cost),) = durations.read(file.read_text().splitlines()).items()
    assert (folder, cost.tests) == ("tests", 1)
    assert 0.05 <= cost.seconds < 5


@pytest.fixture
def this_test(request: pytest.FixtureRequest) -> pytest.Item:
    """This very test."""
    item: pytest.Item = request.node
    return item


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("tests/test_readme.py", "tests"),
        ("tests/decode/test_sim.py", "tests/decode"),
        ("tests/sparse_backward/stand_in/test_x.py", "tests/sparse_backward"),
        ("ptxsim/tests/ordering/test_words.py", "ptxsim/tests/ordering"),
    ],
)
def test_what_a_file_counts_for(path: str, folder: str) -> None:
    assert durations.folder_of(path) == folder
