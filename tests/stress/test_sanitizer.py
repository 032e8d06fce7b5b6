"""Every kernel under compute-sanitizer, where that is installed: no access out of bounds, no barrier misused.

racecheck is not run here: it does not follow an mbarrier on which one lane arrives for its warp, nor a named barrier on
which threads arrive without waiting. What it reported on an H200 is ordered by one of these:

- seesaws, `decode_sm90_small`, kernels of records: which tokens are present, read by a warp and written for a later
  tile, by `kv_empty`; `running_max[1]` by `P1Ready`
- `indexer_logits_sm90`, `indexer_loss_sm90_keys`: weights and gradients, written by a warp and read by the math warps,
  by `q_full`

The simulator follows both, and reports no race.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from mla_cupy.runtime.device import DeviceInfo
from tests.stress.sanitized.families import FAMILIES

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
#: CuPy asks the driver for entry points that it may not have: errors of API calls say nothing.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "synccheck": []}


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed"),
    pytest.mark.parametrize("tool", TOOLS),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls(gpu: DeviceInfo, tool: str, family: str) -> None:
    run(tool, family)


@pytest.mark.parametrize("family", ["decode", "records", "dense", "sparse", "sparse_decode"])
def test_calls_in_99kb(gpu: DeviceInfo, tool: str, family: str) -> None:
    """Calls of the mma.sync kernels, whose builds for smaller GPUs a large one runs on request."""
    run(tool, family, "--only", "_mma", MLA_CUPY_SMEM_KB="99")


def run(tool: str, *arguments: str, **environment: str) -> None:
    assert SANITIZER is not None
    options = ["--tool", tool, *TOOLS[tool], "--error-exitcode", "9"]
    command = [SANITIZER, *options, sys.executable, "-m", "tests.stress.sanitized", *arguments]
    found = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=found)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " calls" in done.stdout
