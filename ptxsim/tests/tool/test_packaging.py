"""The distribution installs alone: a command, a version, NumPy and ml_dtypes, and nothing of mla_cupy."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
SHIPPED = ("ptxsim", "setup.cfg", "setup.py", "packing.py", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE")
PTX = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k()
{
ret;
}
"""


def setuptools_version() -> int:
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


@pytest.fixture(scope="module", name="wheel")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    if setuptools_version() < 77:
        pytest.skip("needs setuptools 77 or newer to build a wheel without a network")
    root = tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        source = HOUSE / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, root / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (root / "dist").glob("*.whl")
    return built


def test_wheel_is_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        texts = {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    sources = [
        *(HOUSE / "ptxsim").rglob("*.py"),
        HOUSE / "ptxsim/arithmetic/native.c",
        *(HOUSE / "ptxsim/host/stub").iterdir(),
    ]
    assert names == {str(path.relative_to(HOUSE)) for path in sources}
    assert "ptxsim = ptxsim.__main__:main" in texts["entry_points.txt"]
    needed = [
        line for line in texts["METADATA"].splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert sorted(line.split()[1].partition(">")[0] for line in needed) == ["ml_dtypes", "numpy"]
    assert "licenses/LICENSE" in texts


def test_installs_alone(wheel: Path, tmp_path: Path) -> None:
    """Into a directory of its own: it runs a kernel without a path to anything but NumPy and ml_dtypes."""
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    ptx = tmp_path / "k.ptx"
    ptx.write_text(PTX)
    code = f"""
import sys
before = set(sys.modules)  # what a .pth file of another package loads
sys.path.insert(0, {str(site)!r})
import ptxsim
assert ptxsim.__file__.startswith({str(site)!r}), ptxsim.__file__
ptxsim.Module(open({str(ptx)!r}).read()).launch("k", 1, 32, [])
heavy = {{"mla_cupy", "cupy", "cuda", "torch", "matplotlib"}}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}} & heavy
print(ptxsim.__version__, sorted(loaded))
"""
    # -E: PYTHONPATH lends no module.
    run = [sys.executable, "-E", "-c", code]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    version, loaded = done.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert version in wheel.name
    script = site / "bin" / "ptxsim"
    text = script.read_text()
    assert "from ptxsim.__main__ import main" in text
    arguments = [sys.executable, str(script), "check", str(ptx)]
    done = subprocess.run(
        arguments, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "k: 2 instructions, all modelled\n", done.stderr


def test_imports_are_relative() -> None:
    """The package never names itself, so that it works under any name."""
    for path in sorted((HOUSE / "ptxsim").glob("*.py")):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].partition(".")[0] not in ("ptxsim", "mla_cupy"), f"{path.name}: {line}"
