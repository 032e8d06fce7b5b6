"""Results of comparing two environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import environments

CASE = '<testcase classname="{file}" file="tests/{file}.py" name="test_{name}">{skipped}</testcase>'
SKIPPED = '<skipped type="pytest.skip" message="{reason}">somewhere</skipped>'
TORCH = "could not import &apos;torch&apos;: No module named &apos;torch&apos;"


def report(path: Path, *tests: tuple[str, str]) -> Path:
    cases = [
        CASE.format(file=file, name=number, skipped=SKIPPED.format(reason=reason) if reason else "")
        for number, (file, reason) in enumerate(tests)
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_files_that_lacked_a_package(tmp_path: Path) -> None:
    first = report(tmp_path / "first.xml", ("a", TORCH), ("a", ""), ("b", "needs two GPUs"), ("c", TORCH), ("d", ""))
    assert environments.files_without(first) == ["tests/a.py", "tests/c.py"]
    assert environments.main(["files", str(first)]) == 0
    assert environments.main(["files", str(report(first, ("a", "")))]) == 1  # else pytest would run everything


def test_a_module_that_is_skipped_as_a_whole(tmp_path: Path) -> None:
    whole = tmp_path / "first.xml"
    text = f'("tests/x/test_y.py", 9, "Skipped: {TORCH}")'
    skipped = f'<skipped message="collection skipped">{text}</skipped>'
    whole.write_text(f'<testsuites><testcase classname="" name="tests.x.test_y">{skipped}</testcase></testsuites>')
    assert environments.files_without(whole) == ["tests/x/test_y.py"]
    assert "could not import" in environments.summary(whole)


def test_a_file_that_no_environment_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = report(tmp_path / "first.xml", ("a", TORCH), ("a", TORCH), ("b", TORCH), ("c", ""))
    second = report(tmp_path / "second.xml", ("a", ""), ("b", "needs a GPU"))
    assert environments.main(["compare", str(first), str(second)]) == 1
    out, err = capsys.readouterr()
    assert err == "no environment runs a test of tests/b.py\n"
    assert "first: 1 tests ran, 3 were skipped\n       3  could not import 'torch'" in out
    assert environments.main(["compare", str(first), str(report(second, ("a", ""), ("b", "")))]) == 0
