"""Every kernel under compute-sanitizer, where that is installed: no access out of bounds, no barrier misused."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mla_cupy.runtime.device import DeviceInfo
from tests.stress.sanitized.families import FAMILIES

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
#: CuPy asks the driver for entry points that it may not have: errors of API calls say nothing.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "synccheck": []}


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls(gpu: DeviceInfo, tool: str, family: str) -> None:
    assert SANITIZER is not None
    options = ["--tool", tool, *TOOLS[tool], "--error-exitcode", "9"]
    command = [SANITIZER, *options, sys.executable, "-m", "tests.stress.sanitized", family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " calls" in done.stdout
