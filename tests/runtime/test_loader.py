"""Obtaining and loading: prebuilt images, forbidden compilation, what is said meanwhile, capture."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_kernels import TINY_REQUEST

from mla_cupy.errors import KernelCompileError, KernelNotBuiltError
from mla_cupy.runtime import cache, driver, loader, nvrtc, worker
from mla_cupy.runtime.build import Build, BuildRequest
from mla_cupy.runtime.launching import ArgumentBlock, Dim3, LoadedKernel, PreparedLaunch
from mla_cupy.runtime.tensormap import TensorMapSpec
from mla_cupy.simulation import SimDriver


class RecordingDriver:
    """Loads nothing, but remembers what it was asked."""

    def __init__(self) -> None:
        self.loads: list[tuple[bytes, str, int, int]] = []  # image, entry, device, dynamic shared memory
        self.capturing: set[int] = set()

    def wanted(self, request: BuildRequest) -> BuildRequest:
        return request

    def load(self, build: Build, device: int) -> LoadedKernel:
        self.loads.append((build.cubin, build.entry, device, build.dynamic_smem))
        return LoadedKernel(build.entry, device, 1)

    def encode_tiled(self, spec: TensorMapSpec) -> bytes:
        return bytes(128)

    def memset(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        pass

    def prepare(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, cluster: Dim3, smem: int, args: ArgumentBlock, pdl: bool
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
    cache.write(entry, loader.obtain(TINY_REQUEST), cache.image_key(TINY_REQUEST))
    loader.forget()
    cache.clear()


def test_off_names_the_command(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    with pytest.raises(KernelNotBuiltError, match="`mla-cupy compile --arch sm_90a --kernels tiny`"):
        loader.obtain(TINY_REQUEST)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(KernelNotBuiltError, match="`mla-cupy compile --arch sm_90a --kernels tiny`"):
        loader.obtain(TINY_REQUEST)


def test_off_names_the_directory_of_images(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images hold what runs by default: the command adds a kernel that a call names."""
    images = tmp_path / "images"
    images.mkdir()
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(images))
    with pytest.raises(KernelNotBuiltError, match=f"--kernels tiny --out {images}`$"):
        loader.obtain(TINY_REQUEST)


def test_off_takes_what_is_cached(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader.obtain(TINY_REQUEST)
    loader.forget()
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    assert loader.obtain(TINY_REQUEST).cubin == made.cubin


def test_missing_nvrtc_is_one_clear_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    with pytest.raises(KernelCompileError, match="NVRTC: got none, expected an installed libnvrtc; pip install"):
        loader.obtain(TINY_REQUEST)
    assert worker._alive == []


@pytest.mark.parametrize("jit", ["off", "lazy"])
def test_prebuilt_needs_no_nvrtc(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jit: str) -> None:
    prebuild(tmp_path / "images")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    monkeypatch.setenv("MLA_CUPY_JIT", jit)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert loader.obtain(TINY_REQUEST).facts["threads"] == 128
    assert cache.usage() == (0, 0)


def test_prebuilt_by_another_compiler_is_used(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuild(tmp_path / "images")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    monkeypatch.setattr(nvrtc, "identity", lambda path: "another NVRTC")
    monkeypatch.setattr(loader, "_compile", lambda request: pytest.fail("compiled"))
    loader.obtain(TINY_REQUEST)


def test_stale_prebuilt_is_ignored_with_one_warning(
    fresh: Path, cuda_src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(tmp_path / "images")
    old = cache.read(tmp_path / "images" / TINY_REQUEST.name)
    (cuda_src / "common" / "scale.cuh").write_text("#pragma once\n__device__ float scale() { return 4.0f; }\n")
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(tmp_path / "images"))
    with pytest.warns(RuntimeWarning, match="was built from other sources"):
        made = loader.obtain(TINY_REQUEST)
    loader.forget()
    loader.obtain(TINY_REQUEST)  # a second warning would be an error
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
        assert loader.obtain(TINY_REQUEST).facts["threads"] == 128
    assert damaged.read_bytes() == b"torn"


def test_a_prebuilt_directory_that_is_none_is_said(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(fresh / "nowhere"))
    with pytest.warns(RuntimeWarning, match="/nowhere is ignored .*No such file or directory"):
        loader.obtain(TINY_REQUEST)


@pytest.mark.parametrize(
    ("terminal", "logs", "lines"), [(True, False, 1), (False, False, 0), (True, True, 0)], ids=["tty", "pipe", "log"]
)
def test_a_terminal_is_told_once_about_a_long_compilation(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    terminal: bool,
    logs: bool,
    lines: int,
) -> None:
    monkeypatch.setattr(loader, "_patience", loader._Patience())
    caplog.set_level(logging.INFO if logs else logging.WARNING, loader.logger.name)
    monkeypatch.setattr(loader, "_QUIET_SECONDS", 0.02)  # to start the child takes longer, and many ticks
    monkeypatch.setattr(loader, "_TICK_SECONDS", 0.005)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    loader.obtain(TINY_REQUEST)
    loader._patience.waited(1.0, "sm_90a")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("mla_cupy: compiling kernels for sm_90a, once for this machine;") == lines


def test_the_log_has_one_line_before_and_after(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mla_cupy.jit")
    loader.obtain(TINY_REQUEST)
    loader.obtain(TINY_REQUEST)
    assert [record.getMessage()[:9] for record in caplog.records] == ["compiling", "compiled "]


def test_loaded_once_per_driver_and_device_with_its_shared_memory(fresh: Path, recording: RecordingDriver) -> None:
    first = loader.loaded(TINY_REQUEST, 0)
    assert loader.loaded(TINY_REQUEST, 0) is first
    assert loader.loaded(TINY_REQUEST, 1) is not first
    cubin = loader.obtain(TINY_REQUEST).cubin
    assert recording.loads == [(cubin, "mla_tiny", 0, 2048), (cubin, "mla_tiny", 1, 2048)]
    with driver.use(RecordingDriver()) as other:
        loader.loaded(TINY_REQUEST, 0)
        assert len(other.loads) == 1
    assert driver.current() is recording


def test_what_a_driver_has_loaded_is_dropped_with_it(fresh: Path, recording: RecordingDriver) -> None:
    loader.loaded(TINY_REQUEST, 0)
    loader.drop_kernels_of(RecordingDriver())
    loader.loaded(TINY_REQUEST, 0)
    assert len(recording.loads) == 1
    loader.drop_kernels_of(recording)
    loader.loaded(TINY_REQUEST, 0)
    assert len(recording.loads) == 2


def test_loading_during_capture_says_what_to_do(fresh: Path, recording: RecordingDriver) -> None:
    recording.capturing.add(5)
    with pytest.raises(KernelNotBuiltError, match=r"being captured.*make a plan, or call the function once, before"):
        loader.loaded(TINY_REQUEST, 0, stream=5)
    assert recording.loads == []
    loader.loaded(TINY_REQUEST, 0, stream=6)
    loader.loaded(TINY_REQUEST, 0, stream=5)  # loaded by now: a capture may launch it


def test_a_simulator_wants_ptx_alone_unless_there_is_more(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = TINY_REQUEST.as_virtual()
    assert SimDriver().wanted(TINY_REQUEST) == virtual
    made = loader.obtain(virtual)
    assert (made.cubin, made.facts["threads"]) == (b"", 128)
    loader.forget()
    again = worker.cached(virtual)
    assert again is not None, "it is in the cache, for the next process"
    assert again.ptx == made.ptx
    loader.obtain(TINY_REQUEST)
    assert SimDriver().wanted(TINY_REQUEST) == TINY_REQUEST
    cache.clear()
    monkeypatch.setenv("MLA_CUPY_JIT", "off")
    assert SimDriver().wanted(TINY_REQUEST) == TINY_REQUEST, "what is refused is what can be built beforehand"
