"""Every kernel under compute-sanitizer, where that is installed: no access out of bounds, no barrier misused."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mla_cupy.runtime.device import DeviceInfo

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_calls(gpu: DeviceInfo, tool: str) -> None:
    """CuPy asks the driver for entry points that it may not have: errors of API calls say nothing."""
    assert SANITIZER is not None
    options = ["--tool", tool, "--error-exitcode", "9"] + (["--report-api-errors", "no"] if tool == "memcheck" else [])
    command = [SANITIZER, *options, sys.executable, "-m", "tests.stress.sanitized_calls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " calls" in done.stdout
