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
