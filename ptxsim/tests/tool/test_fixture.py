"""The pytest fixture: a test that uses it runs in every mode, and fails in the one that shows a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from ptxsim.testing import Simulation
from simtest.single import program

TEST = '''
import numpy as np

PTX = """{ptx}"""

def test_doubles(simulate):
    x, y = np.arange(32, dtype="u4"), np.zeros(32, "u4")
    report = simulate(PTX, args=[x[:16] if simulate.mode == "early" else x, y])
    assert report.total > 0 and (y == 2 * x).all(), (simulate.mode, simulate.seed)
    assert simulate.mode != "late"
'''


def test_runs_in_every_mode(tmp_path: Path) -> None:
    ptx = program("add.u32 %d, %a, %a;", [np.zeros(32, "u4")], np.zeros(32, "u4"))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["ptxsim.testing"]\n')
    (tmp_path / "test_it.py").write_text(TEST.format(ptx=ptx))
    # The caller's own options (a base directory, a plugin) are not this run's.
    environment = {**os.environ, "PYTHONPATH": str(Path(ptxsim.__file__).parents[1]), "PYTEST_ADDOPTS": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert "2 failed" in run.stdout
    assert "test_doubles[late]" in run.stdout
    assert "test_doubles[early]" in run.stdout
    assert "MemoryFault" in run.stdout
    assert "testing.py" not in run.stdout, "a finding shows the line of the test, not the simulator's own"
    assert "module.py" not in run.stdout


def test_several_kernels_need_a_name(tmp_path: Path) -> None:
    one = program("add.u32 %d, %a, %a;", [np.zeros(32, "u4")], np.zeros(32, "u4"))
    head, body = one.split(".visible", 1)
    both = f"{head}.visible{body}\n.visible{body.replace('.entry ', '.entry second_', 1)}"
    with pytest.raises(ptxsim.SimError, match=r"name one of the kernels .*second_"):
        Simulation("early", 0)(both)
    (tmp_path / "one.ptx").write_text(one)
    with pytest.raises(ptxsim.SimError, match="arguments"):
        Simulation("early", 0)(tmp_path / "one.ptx")
