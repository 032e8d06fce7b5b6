"""Obtaining and loading: prebuilt images, forbidden compilation, what is said meanwhile, capture."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_kernels import SLOW_REQUEST, TINY_REQUEST

from mla_cupy.errors import KernelCompileError, KernelNotBuiltError
from mla_cupy.runtime import cache, driver, kernels, nvrtc, worker
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.driver import ArgumentBlock, Dim3, Kernel, PreparedLaunch
from mla_cupy.runtime.tensormap import TensorMapSpec


class RecordingDriver:
    """Loads nothing, but remembers what it was asked."""

    def __init__(self) -> None:
        self.loads: list[tuple[bytes, str, int, int]] = []  # image, entry, device, dynamic shared memory
        self.capturing: set[int] = set()

    def load(self, build: Build, device: int) -> Kernel:
        self.loads.append((build.cubin, build.entry, device, build.dynamic_smem))
        return Kernel(build.entry, device, 1)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        return bytes(128)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        pass

    def prepare(
        self, kernel: Kernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
    ) -> PreparedLaunch:
        return lambda stream: None

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def device_guard(self, device: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@pytest.fixture
def recording() -> Iterator[RecordingDriver]:
    with driver.use(RecordingDriver()) as used:
        yield used


def prebuild(directory: Path) -> None:
    entry = directory / TINY_REQUEST.name
    cache.write(entry, kernels.obtain(TINY_REQUEST), cache.image_key(TINY_REQUEST))
    kernels.forget()
    cache.clear()


def test_off_names_the_command(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    with pytest.raises(KernelNotBuiltError, match="`mla-cupy compile --arch sm_90a --kernels tiny`"):
        kernels.obtain(TINY_REQUEST)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(KernelNotBuiltError, match="`mla-cupy compile --arch sm_90a --kernels tiny`"):
        kernels.obtain(TINY_REQUEST)


def test_off_takes_what_is_cached(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kernels.obtain(TINY_REQUEST)
    kernels.forget()
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    assert kernels.obtain(TINY_REQUEST).cubin == made.cubin


def test_missing_nvrtc_is_one_clear_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(KernelCompileError, match="NVRTC: got none, expected an installed libnvrtc; run pip install"):
        kernels.obtain(TINY_REQUEST)
    assert worker._alive == []


@pytest.mark.parametrize("jit", ["off", "lazy"])
def test_prebuilt_needs_no_nvrtc(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jit: str) -> None:
    prebuild(tmp_path / "images")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    monkeypatch.setenv("MLA_CUPY_JIT", jit)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert kernels.obtain(TINY_REQUEST).facts["threads"] == 128
    assert cache.usage() == (0, 0)


def test_prebuilt_by_another_compiler_is_used(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuild(tmp_path / "images")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    monkeypatch.setattr(nvrtc, "identity", lambda path: "another NVRTC")
    monkeypatch.setattr(kernels, "_compile", lambda request: pytest.fail("compiled"))
    kernels.obtain(TINY_REQUEST)


def test_stale_prebuilt_is_ignored_with_one_warning(
    fresh: Path, cuda_src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(tmp_path / "images")
    old = cache.read(tmp_path / "images" / TINY_REQUEST.name)
    (cuda_src / "common" / "scale.cuh").write_text("#pragma once\n__device__ float scale() { return 4.0f; }\n")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    with pytest.warns(RuntimeWarning, match="was built from other sources"):
        made = kernels.obtain(TINY_REQUEST)
    kernels.forget()
    kernels.obtain(TINY_REQUEST)  # a second warning would be an error
    assert old is not None
    assert made.cubin != old.cubin


def test_damaged_prebuilt_is_ignored_and_left_alone(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(tmp_path / "images")
    damaged = tmp_path / "images" / TINY_REQUEST.name / "kernel.cubin"
    damaged.write_bytes(b"torn")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert kernels.obtain(TINY_REQUEST).facts["threads"] == 128
    assert damaged.read_bytes() == b"torn"


def test_a_prebuilt_directory_that_is_none_is_said(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", "/nowhere")
    with pytest.warns(RuntimeWarning, match="/nowhere is not a directory"):
        kernels.obtain(TINY_REQUEST)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_once_about_a_long_compilation(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(kernels, "_QUIET_SECONDS", 0.3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    kernels.obtain(SLOW_REQUEST)
    said = capsys.readouterr()
    assert said.out == ""
    expected = ["mla_cupy: compiling mla_slow-plain-sm_90a, once for this machine ..."] if terminal else []
    assert said.err.splitlines() == expected


def test_the_log_has_one_line_before_and_after(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mla_cupy.jit")
    kernels.obtain(TINY_REQUEST)
    kernels.obtain(TINY_REQUEST)
    assert [record.getMessage()[:9] for record in caplog.records] == ["compiling", "compiled "]


def test_loaded_once_per_driver_and_device_with_its_shared_memory(fresh: Path, recording: RecordingDriver) -> None:
    first = kernels.loaded(TINY_REQUEST, 0)
    assert kernels.loaded(TINY_REQUEST, 0) is first
    assert kernels.loaded(TINY_REQUEST, 1) is not first
    cubin = kernels.obtain(TINY_REQUEST).cubin
    assert recording.loads == [(cubin, "mla_tiny", 0, 2048), (cubin, "mla_tiny", 1, 2048)]
    with driver.use(RecordingDriver()) as other:
        kernels.loaded(TINY_REQUEST, 0)
        assert len(other.loads) == 1
    assert driver.current() is recording


def test_loading_during_capture_says_what_to_do(fresh: Path, recording: RecordingDriver) -> None:
    recording.capturing.add(5)
    with pytest.raises(KernelNotBuiltError, match=r"being captured.*make a plan, or call the function once, before"):
        kernels.loaded(TINY_REQUEST, 0, stream=5)
    assert recording.loads == []
    kernels.loaded(TINY_REQUEST, 0, stream=6)
    kernels.loaded(TINY_REQUEST, 0, stream=5)  # loaded by now: a capture may launch it
