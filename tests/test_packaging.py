"""The distributions are whole, the wheel is small and reproducible, and importing it is quick and light."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import ptxsim

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = (
    "mla_cupy",
    "cuda_src",
    "bench",
    "ptxsim/packing.py",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
MAX_WHEEL_BYTES = 5 << 19
MAX_IMPORT_SECONDS = 0.1


def test_no_text_of_the_package_points_to_an_example() -> None:
    """No wheel holds one: the documentation does."""
    sources = [path for name in ("mla_cupy", "bench", "ptxsim/ptxsim") for path in (REPOSITORY / name).rglob("*.py")]
    assert len(sources) > 100
    assert not [path for path in sources if re.search(r"examples/\w+\.py", path.read_text(encoding="utf-8"))]


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
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, root / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (root / "dist").glob("*.whl")
    return built


LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info"
)


def build(tree: Path, what: str, umask: int = 0o022, **environment: str) -> Path:
    """Build a wheel or a source distribution of a tree, without a network."""
    if setuptools_version() < 77:
        pytest.skip("needs setuptools 77 or newer")
    code = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, umask=umask, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "dist").iterdir()
    return built


@pytest.mark.parametrize("part", ["", "ptxsim"])
@pytest.mark.parametrize("what", ["wheel", "sdist"])
def test_distributions_are_reproducible(what: str, part: str, tmp_path: Path) -> None:
    """Byte for byte, wherever, whenever and under whatever umask."""
    built = []
    for seed, seconds, umask in (("1", 1_500_000_000, 0o002), ("2", 1_600_000_000, 0o077)):
        tree = tmp_path / f"tree-{seed}"
        shutil.copytree(REPOSITORY / part, tree, ignore=LEFT_OUT)
        for path in tree.rglob("*"):
            os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~umask)
            os.utime(path, (seconds, seconds))
        built.append(build(tree, what, umask, PYTHONHASHSEED=seed).read_bytes())
    assert built[0] == built[1]


def test_source_distribution_holds_the_tests(tmp_path: Path) -> None:
    """And all that they need: some of those that read the tree pass there."""
    shutil.copytree(REPOSITORY, tmp_path / "tree", ignore=LEFT_OUT)
    with tarfile.open(build(tmp_path / "tree", "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        # Patch releases of Python 3.10 and 3.11 before the middle of 2023 do not know the argument.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    for folder in ("tests", "ptxsim/tests", "bench", "cuda_src", "examples", "mla_cupy"):
        assert files_of(folder, ".py", ".cu", ".cuh", ".md", ".json", ".jsonl", ".npz", ".c", ".txt") - names == set()
    (root,) = tmp_path.glob("mla_cupy-*")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/layering/test_layering.py", "tests/layering/test_planted_bugs.py", "tests/test_readme.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_metadata_is_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    for label in ("Source", "Documentation", "Changelog", "Issues"):
        assert any(line.startswith(f"Project-URL: {label}, https://") for line in lines)
    for major in ("12", "13"):
        assert f"Classifier: Environment :: GPU :: NVIDIA CUDA :: {major}" in lines
    assert any(line.startswith("Keywords: ") and "attention" in line for line in lines)
    minors = [line.rpartition(".")[2] for line in lines if re.match(r"Classifier: .* :: 3\.\d+$", line)]
    assert "Requires-Python: >=3." + minors[0] in lines
    assert minors == [str(minor) for minor in range(int(minors[0]), int(minors[-1]) + 1)]
    assert sys.version_info.minor <= int(minors[-1])


def test_entry_points_lead_somewhere() -> None:
    """Without the packages that load them."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    groups = config["options.entry_points"]
    assert {"console_scripts", "vllm.general_plugins", "sglang.srt.plugins"} == set(groups)
    for lines in groups.values():
        for line in lines.strip().splitlines():
            module, _, name = line.partition("=")[2].strip().partition(":")
            assert callable(getattr(importlib.import_module(module), name))


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
        *files_of("mla_cupy", ".py", ".c"),
        "mla_cupy/py.typed",
        *(f"mla_cupy/{name}" for name in files_of("bench", ".py")),
        *(f"mla_cupy/{name}" for name in files_of("cuda_src", ".cu", ".cuh", ".md")),
    }
    assert expected - names == set()
    extra = {name for name in names - expected if ".dist-info/" not in name}
    assert {name for name in extra if not name.endswith((".md", ".jsonl", ".png"))} == set()
    version = wheel.name.split("-")[1]
    assert {name.partition("/")[0] for name in names} == {"mla_cupy", f"mla_cupy-{version}.dist-info"}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    assert {"cu12", "cu12-torch", "cu13"} <= {*re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)}
    (simulator,) = re.findall(r"^Requires-Dist: ptxsim(.*)$", metadata, re.MULTILINE)
    assert simulator == f"=={ptxsim.__version__.rpartition('.')[0]}.*"
    assert "License-Expression: MIT" in metadata or "License: MIT" in metadata


def test_wheel_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout: the sources are found, all of a kernel's files with them, and the benches."""
    site = tmp_path / "site"
    shutil.copytree(REPOSITORY / "ptxsim" / "ptxsim", site / "ptxsim")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"""
import mla_cupy, mla_cupy.bench.cli
from mla_cupy import parts
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import sources
assert parts.simulator().__file__.startswith({str(site)!r})
assert mla_cupy.__file__.startswith({str(site)!r}), mla_cupy.__file__
assert sources.source_root() == __import__("pathlib").Path({str(site)!r}) / "mla_cupy" / "cuda_src"
print(sum(len(sources.gather(spec.source)) > 1 for spec in KERNELS.values()), len(KERNELS))
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


CALLER = """\
import mla_cupy

reveal_type(mla_cupy.mla_decode)
"""
PARTS = """
import site, sys
before = sys.path[:]
site.addsitedir(sys.argv[1])
sys.path[:] = [path for path in sys.path if path not in before] + before
import ptxsim
import mla_cupy.bench.cli
from mla_cupy import parts
assert parts.simulator() is ptxsim
print(mla_cupy.__file__, ptxsim.__file__)
"""


def test_editable_installs_can_be_read(tmp_path: Path) -> None:
    """A type checker elsewhere, which runs no hooks, reads them; and a program finds the parts next to the package."""
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY, tree, ignore=LEFT_OUT)
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    wheels = [str(build(folder, "editable")) for folder in (tree, tree / "ptxsim")]
    subprocess.run([*install, *wheels], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")

    caller = tmp_path / "caller.py"
    caller.write_text(CALLER)
    checked = run_elsewhere(tmp_path, "-m", "mypy", "--python-executable", str(python), str(caller))
    assert 'note: Revealed type is "def (q: ' in checked

    assert run_elsewhere(tmp_path, "-c", PARTS, str(site)).split() == [
        str(tree / "mla_cupy" / "__init__.py"),
        str(tree / "ptxsim" / "ptxsim" / "__init__.py"),
    ]


def run_elsewhere(folder: Path, *arguments: str) -> str:
    """Output of Python in a folder, without the checkout on its path."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "MLA_CUPY_JIT": "lazy"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORT = """
import sys, time
import numpy, ml_dtypes
before = set(sys.modules)  # what a .pth file of another package loads is not our doing
start = time.perf_counter()
import mla_cupy
seconds = time.perf_counter() - start
heavy = {"cupy", "cuda", "cuda.bindings", "torch", "jax", "mla_cupy.ops", "mla_cupy.reference"} - before
print(seconds, ",".join(sorted(heavy & set(sys.modules))) or "none")
"""


def import_once() -> tuple[float, str]:
    """Time of an import beyond NumPy and ml_dtypes, and its forbidden modules."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, heavy = done.stdout.split()
    return float(seconds), heavy


def test_import_is_light() -> None:
    assert import_once()[1] == "none"


@pytest.mark.perf
def test_import_is_quick() -> None:
    """The best of several runs, since other work on the machine only adds to it."""
    assert min(import_once()[0] for _ in range(5)) <= MAX_IMPORT_SECONDS
