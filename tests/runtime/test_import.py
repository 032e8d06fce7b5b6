"""Import must not load CuPy, CUDA or a driver, nor compile in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., "subprocess.CompletedProcess[str]"]

MODULES = (
    "sources",
    "nvrtc",
    "build",
    "cache",
    "worker",
    "loader",
    "driver",
    "cuda_driver",
    "tensormap",
    "device",
    "report",
    "env",
    "elf",
)


@pytest.mark.parametrize("module", ["mla_cupy", "mla_cupy.cli", *(f"mla_cupy.runtime.{name}" for name in MODULES)])
def test_import_is_light(python: Python, shared_library: Callable[[str, str], Path], module: str) -> None:
    """A libcuda is in reach, so that loading it would show."""
    library = shared_library("#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); }\n", "libcuda.so.1")
    code = f"""
import sys
from pathlib import Path
import {module}
unwanted = {{"cupy", "cuda.bindings", "cuda.pathfinder", "torch", "jax", "rich", "platformdirs"}}
heavy = sorted(unwanted & set(sys.modules))
loaded = [name for name in ("libcuda.so", "libnvrtc") if name in Path("/proc/self/maps").read_text()]
print(heavy, loaded)
"""
    done = python(code, LD_LIBRARY_PATH=str(library.parent), MLA_CUPY_JIT="lazy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n", "")


def test_background_compilation_leaves_this_process_light(fresh: Path, python: Python) -> None:
    code = """
import sys, tiny_kernels
from pathlib import Path
from mla_cupy.runtime import worker
worker.start([tiny_kernels.TINY_REQUEST])
print(len(worker._background), "cupy" in sys.modules, "libnvrtc" in Path("/proc/self/maps").read_text())
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 False False\n", "")
