"""Environment variables that are wrong: an import and `info` survive them, and the user is told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_kernels import TINY_REQUEST

from mla_cupy.errors import ArgumentError
from mla_cupy.runtime import cache, env, loader, report

Python = Callable[..., "subprocess.CompletedProcess[str]"]

NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { *handle = (void*)1ul; return 0; }
int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void* handle, char* name, unsigned size) { name[0] = 'H'; name[1] = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void* handle, void* memory) { return 0; }
int nvmlSystemGetDriverVersion(char* version, unsigned size) { version[0] = 0; return 0; }
"""


@pytest.fixture
def hopper_library(shared_library: Callable[[str, str], Path]) -> str:
    """A replacement of NVML that shows a Hopper GPU, so that an import starts to compile."""
    return str(shared_library(NVML, "libnvidia-ml.so.1").parent)


@pytest.mark.parametrize(
    "wrong",
    [
        {"MLA_CUPY_JIT": "foo"},
        {"MLA_CUPY_LINEINFO": "yes"},
        {"MLA_CUPY_TMEM_CHECK": "2"},
        {"MLA_CUPY_CUBIN_DIR": "/nowhere"},
        {"MLA_CUPY_CUDA_SRC": "/nowhere"},
        {"MLA_CUPY_NVRTC": "/dev/null"},
        {"MLA_CUPY_CACHE_DIR": "/proc/nowhere"},
        {"MLA_CUPY_CACHE_DIR": "/proc/nowhere", "TMPDIR": "/proc/nowhere"},
    ],
    ids=lambda wrong: ",".join(wrong),
)
def test_import_survives(fresh: Path, python: Python, hopper_library: str, wrong: dict[str, str]) -> None:
    """Import with warnings as errors; the fixture's sources hold none of the package's kernels, so nothing is
    compiled.
    """
    settings = {"MLA_CUPY_JIT": "import", "LD_LIBRARY_PATH": hopper_library, "CUDA_VISIBLE_DEVICES": "0", **wrong}
    done = python("import mla_cupy", **settings)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_call_says_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "foo")
    with pytest.raises(ArgumentError, match="MLA_CUPY_JIT: got 'foo', expected one of import, lazy, off"):
        loader.obtain(TINY_REQUEST)


def test_problems_are_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.problems() == []
    monkeypatch.setenv("MLA_CUPY_JIT", "foo")
    monkeypatch.setenv("MLA_CUPY_CACHEDIR", "/x")
    monkeypatch.setenv("MLA_CUPY_QQQQQQQQQQQQQQQQ", "1")
    jit, misspelt, unknown = env.problems()
    assert jit == "environment variable MLA_CUPY_JIT: got 'foo', expected one of import, lazy, off"
    assert misspelt == "environment variable: got MLA_CUPY_CACHEDIR, expected MLA_CUPY_CACHE_DIR; it is ignored"
    assert unknown.startswith(
        "environment variable: got MLA_CUPY_QQQQQQQQQQQQQQQQ, expected one of MLA_CUPY_CACHE_DIR,"
    )


def test_report_holds_the_problems_and_does_not_warn(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning would be an error here."""
    monkeypatch.setenv("MLA_CUPY_JIT", "foo")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", "/proc/nowhere")
    said = report.report()["problems"]
    assert said == [cache.find_places().problem, *env.problems()]
    assert "the kernel cache /proc/nowhere cannot be used" in said[0]
