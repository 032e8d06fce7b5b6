"""The wheel is small and whole, and importing it is quick and light."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = ("mla_cupy", "cuda_src", "bench", "tests/ptxsim", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
MEGABYTE = 1 << 20
IMPORT_SECONDS = 0.1


def setuptools_version() -> int:
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    if setuptools_version() < 77:
        pytest.skip("needs setuptools 77 or newer to build a wheel without a network")
    root = tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, root / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (root / "dist").glob("*.whl")
    return built


def files_of(folder: str, *suffixes: str) -> set[str]:
    return {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_wheel_is_whole_and_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    expected = {
        *files_of("mla_cupy", ".py"),
        "mla_cupy/py.typed",
        *(f"mla_cupy/{name}" for name in files_of("bench", ".py")),
        *(f"mla_cupy/{name.removeprefix('tests/')}" for name in files_of("tests/ptxsim", ".py", ".md")),
        *(f"mla_cupy/{name}" for name in files_of("cuda_src", ".cu", ".cuh", ".md")),
    }
    assert expected - names == set()
    extra = {name for name in names - expected if ".dist-info/" not in name}
    assert {name for name in extra if not name.endswith((".md", ".jsonl", ".png"))} == set()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MEGABYTE
    assert "Provides-Extra: cu12" in metadata
    assert "Provides-Extra: cu13" in metadata
    assert "License-Expression: MIT" in metadata or "License: MIT" in metadata


def test_wheel_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout: the sources are found, all of a kernel's files with them, and the benches."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"""
import mla_cupy, mla_cupy.bench.cli
from mla_cupy import parts
from mla_cupy.launchers import SPECS
from mla_cupy.runtime import sources
assert parts.simulator().__name__ == "mla_cupy.ptxsim"
assert mla_cupy.__file__.startswith({str(site)!r}), mla_cupy.__file__
assert sources.source_root() == __import__("pathlib").Path({str(site)!r}) / "mla_cupy" / "cuda_src"
print(sum(len(sources.gather(spec.source)) > 1 for spec in SPECS.values()), len(SPECS))
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MLA_CUPY_CUDA_SRC")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(site), "MLA_CUPY_JIT": "lazy"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, registered = done.stdout.split()
    assert found == registered != "0"


def test_import_is_quick_and_light() -> None:
    """Beyond NumPy and ml_dtypes; the best of several runs, since other work on the machine only adds to it."""
    code = """
import sys, time
import numpy, ml_dtypes
before = set(sys.modules)  # what a .pth file of another package loads is not our doing
start = time.perf_counter()
import mla_cupy
seconds = time.perf_counter() - start
heavy = {"cupy", "cuda", "cuda.bindings", "torch", "jax", "mla_cupy.ops", "mla_cupy.reference"} - before
print(seconds, ",".join(sorted(heavy & set(sys.modules))) or "none")
"""
    seconds = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        taken, heavy = done.stdout.split()
        assert heavy == "none"
        seconds.append(float(taken))
    assert min(seconds) <= IMPORT_SECONDS
