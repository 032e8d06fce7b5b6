"""The counts of skipped tests that end a run, alone and with processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations, skips

REPOSITORY = Path(__file__).resolve().parents[1]
pytest_plugins = "pytester"
CONFTEST = """
from tests.skips import Skips
def pytest_configure(config):
    config.pluginmanager.register(Skips())
"""
TESTS = """
import pytest
@pytest.fixture
def gpu(): pytest.skip("no CUDA GPU")
@pytest.mark.parametrize("n", range(40))
def test_gpu(gpu, n): pass
@pytest.mark.skipif(True, reason="needs 12 GiB, there are 3")
def test_large(): pass
@pytest.mark.skipif(True, reason="needs 6 GiB, there are 3")
def test_larger(): pass
def test_here(): pass
@pytest.mark.gpu
def test_there(): assert False
"""


def test_reasons_that_differ_in_a_number_are_one() -> None:
    reasons = ["no CUDA GPU", "needs 12 GiB, there are 3", "no CUDA GPU", "needs 6 GiB, there are 3", "torch"]
    assert skips.counted(reasons) == [(2, "needs 12 GiB, there are 3"), (2, "no CUDA GPU"), (1, "torch")]


def test_the_list_is_short() -> None:
    lines = skips.lines_of(f"reason {chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(30))
    assert len(lines) == skips.MAX_REASONS + 1
    assert lines[-1].split(maxsplit=1) == ["5", "for 5 other reasons"]
    assert skips.lines_of([]) == []


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_counts_its_skips(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_decode_gpu.py").write_text("raise RuntimeError('not to be imported where there is no GPU')")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = gpu\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *processes]  # as in the README
    environment |= {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no CUDA GPU") == 1
    said = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["40", "no CUDA GPU"] in said
    assert ["2", "needs 12 GiB, there are 3"] in said or ["2", "needs 6 GiB, there are 3"] in said
    assert "42 tests skipped" in done.stdout
    assert done.stdout.count(skips.NO_GPU) == done.stdout.count(skips.whole_run()) == 1
    assert done.stdout.splitlines()[-1].startswith("1 passed, 42 skipped")
    assert done.stdout.index(skips.whole_run()) < done.stdout.index("no CUDA GPU")


LONG_FORMS = """
import pytest
def one(n, slow): return pytest.param(n, id=f"case {n}", marks=[pytest.mark.slow] if slow else [])
@pytest.mark.parametrize("n", [one(n, n % 2) for n in range(4)])
@pytest.mark.parametrize("mode", [pytest.param([1], marks=pytest.mark.slow), [2]])
def test_some(n, mode): pass
@pytest.mark.parametrize("n", [one(n, True) for n in range(3)])
def test_all(n): pass
@pytest.fixture(params=[one(n, n > 1) for n in range(4)])
def made(request): return request.param
def test_fixture(made): pass
@pytest.mark.slow
class TestSlow:
    def test_it(self): pass
@pytest.mark.slow
@pytest.mark.parametrize("n", range(50))
def test_slow(n): pass
"""


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ((), "4 passed, 5 deselected"),
        (("test_it.py",), "4 passed, 62 deselected"),
        (("-m", "slow"), "62 passed, 4 deselected"),
        (("-m", "slow or not slow"), "66 passed"),
    ],
    ids=str,
)
def test_long_forms_are_not_collected_by_a_run_of_all_tests(
    pytester: pytest.Pytester, arguments: tuple[str, ...], end: str
) -> None:
    """The same tests run as where they are deselected; of parameters without names, all are collected."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=LONG_FORMS)
    pytester.makeini("[pytest]\ntestpaths = .\naddopts = -m 'not slow'\nmarkers = slow\n  gpu\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    assert result.ret == 0
    assert end in result.stdout.lines[-1]


def test_files_that_are_not_collected_without_a_gpu_need_one() -> None:
    """Their name says so; each has the mark for all of its tests."""
    files = list((REPOSITORY / "tests").rglob("test_*gpu.py"))
    assert len(files) > 20
    for file in files:
        assert re.search(r"^pytestmark = \[?\s*pytest\.mark\.gpu\b", file.read_text(), re.MULTILINE), file


def test_how_long_it_takes_is_that_of_the_table() -> None:
    seconds = durations.table_in(durations.PAGE.read_text())[durations.ALL].seconds
    (minutes,) = (int(word) for word in skips.whole_run().split() if word.isdigit())
    assert 0 <= 60 * minutes - seconds / 2 < 60
