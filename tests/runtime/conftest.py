"""Tiny kernels, a cache of their own, and child processes, for the tests of the runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY, SCALE, TINY, slow_source

from mla_cupy.runtime import cache, loader, nvrtc


@pytest.fixture
def cuda_src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with one tiny and one slow kernel."""
    root = tmp_path / "cuda_src"
    for name, text in {
        "generic/tiny.cu": TINY,
        "common/scale.cuh": SCALE,
        "generic/slow.cu": slow_source(600),
        "generic/endless.cu": slow_source(2500),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv("MLA_CUPY_CUDA_SRC", str(root))
    return root


@pytest.fixture
def fresh(cuda_src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source tree, an empty cache and nothing in memory; gives the cache directory."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(directory))
    for name in ("CUBIN_DIR", "JIT", "NVRTC", "LINEINFO", "TMEM_CHECK", "DEBUG", "ADMISSION"):
        monkeypatch.delenv(f"MLA_CUPY_{name}", raising=False)
    cache._warned.clear()
    loader.forget()
    yield directory
    loader.forget()


def _line(major: int) -> str:
    found = list(nvrtc._wheels((major,)))
    if not found:
        pytest.skip(f"no NVRTC wheel of CUDA {major}")
    return found[0]


@pytest.fixture(params=[12, 13], ids=["nvrtc12", "nvrtc13"])
def nvrtc_line(request: pytest.FixtureRequest) -> nvrtc.Nvrtc:
    """Each installed line of NVRTC, in one process."""
    return nvrtc.load(_line(request.param))


@pytest.fixture(scope="session")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path | str, str], Path]:
    """Compile C into a shared library of a given name, in a directory of its own."""
    compiler = shutil.which("gcc") or shutil.which("cc")

    def build(source: Path | str, name: str) -> Path:
        if compiler is None:
            pytest.skip("no C compiler")
        directory = tmp_path_factory.mktemp("library")
        if isinstance(source, str):
            (directory / "source.c").write_text(source)
            source = directory / "source.c"
        library = directory / name
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", library, source, "-ldl"], check=True
        )
        return library

    return build


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in another interpreter, which sees this repository and this environment."""

    def run(code: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
