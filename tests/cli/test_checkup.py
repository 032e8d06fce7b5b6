"""`mla-cupy info --check` finds what is wrong, says what to do, and fails then."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from mla_cupy import checkup, cli
from mla_cupy.runtime import device, loader, nvrtc
from mla_cupy.runtime.device import VisibleGpu

REPOSITORY = Path(__file__).resolve().parents[2]
H200 = VisibleGpu("NVIDIA H200", (9, 0), 141 << 30, "575.57")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation where all is well, without a GPU."""
    for name in [name for name in os.environ if name.startswith("MLA_CUPY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "nvml_gpus", list)
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    monkeypatch.setattr(checkup, "_DRIVER_FILES", ())
    loader.forget()


def found(name: str) -> checkup.Check:
    return next(check for check in checkup.checks() if check.name == name)


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name.startswith(package):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


def of_version(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else others(name))


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--check", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "versions" in facts
    states = {check["name"]: check["state"] for check in facts["checks"]}
    assert states["NVRTC"] == states["cache"] == states["kernel"] == "ok"
    assert states["driver"] == "absent"


def test_what_is_wrong_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "foo")
    assert cli.main(["info", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "got 'foo', expected one of import, lazy, off" in shown
    assert "environment: correct or unset it" in shown


def test_a_gpu_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_DRIVER_FILES", (str(tmp_path),))
    assert "nvidia-smi" in found("driver").fix


def test_a_driver_older_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "driver_cuda", lambda: (11, 8))
    assert "install the extra cu11" in found("NVRTC").fix


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert found("NVRTC").fix.startswith('pip install "nvidia-cuda-nvrtc-cu12')
    assert found("kernel").state == "wrong"
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path))
    assert found("NVRTC").state == "absent"


def test_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        without("cupy", context)
        assert found("CuPy").state == "absent"
        context.setattr(device, "nvml_gpus", lambda: [H200])
        assert found("CuPy").fix.startswith('pip install "cupy-cuda12x')
    with monkeypatch.context() as context:
        of_version("cupy-cuda13x", "14.0", context)
        of_version("cupy-cuda12x", "14.0", context)
        assert found("CuPy").fix.startswith("pip uninstall cupy-cuda12x cupy-cuda13x")
    of_version("cupy-cuda12x", "13.6.0", monkeypatch)
    assert found("CuPy").state == "wrong"


def test_a_gpu_that_cupy_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "nvml_gpus", lambda: [H200])
    of_version("cupy-cuda12x", "14.2.0", monkeypatch)
    assert "CUDA_VISIBLE_DEVICES" in found("CuPy").fix


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", "/proc/nowhere")
    assert found("cache").fix == "set MLA_CUPY_CACHE_DIR to another directory"


def test_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_version("torch", "2.3.1+cu121", monkeypatch)
    assert found("torch").fix == 'pip install --upgrade "torch>=2.4"'


def test_a_kernel_that_may_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    assert found("kernel").fix.startswith("run `mla-cupy compile --arch sm_90a --kernels merge_states`")


def test_the_oldest_versions_are_those_of_the_extras() -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    extras = config["options.extras_require"]
    lines = "\n".join(extras.values()).splitlines()
    for name, oldest in checkup.FRAMEWORKS.items():
        version = ".".join(map(str, oldest))
        assert any(line.startswith(f"{name}>={version}") for line in lines)
    assert f"cupy-cuda12x>={checkup.OLDEST_CUPY[0]}" in lines
