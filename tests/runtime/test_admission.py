"""Records of admitted kernels: when they hold, what damage does, who may write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY, TINY_REQUEST

from mla_cupy.errors import ArgumentError
from mla_cupy.runtime import admission, cache, device
from mla_cupy.runtime.admission import Conditions
from mla_cupy.runtime.device import EVERY_KERNEL, DeviceInfo, VisibleGpu

GPU, TARGET, DRIVER = "NVIDIA B200", "sm_100a", "580.1"


@pytest.fixture(autouse=True)
def driver(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and NVML shows a B200."""
    monkeypatch.setattr(device, "nvml_gpus", lambda: [VisibleGpu(GPU, (10, 0), 1 << 37, DRIVER)])


def names() -> set[str]:
    return set(admission.admitted(GPU, TARGET))


def write(*passed: str, failed: tuple[str, ...] = ()) -> None:
    admission.write(Conditions.here(GPU, TARGET), dict.fromkeys(passed, TINY_REQUEST), failed)


def only_record(fresh: Path) -> Path:
    (path,) = (fresh / admission.LAYOUT).glob("*.json")
    return path


def test_nothing_is_admitted_without_a_record(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then neither NVML nor a compiler is looked for."""
    monkeypatch.setattr(admission.Conditions, "here", None)
    assert names() == set()
    assert admission.records() == []


def test_admitted_kept_and_withdrawn(fresh: Path) -> None:
    write("one", "two")
    assert names() == {"one", "two"}
    write("three")
    assert names() == {"one", "two", "three"}
    write(failed=("one", "unknown"))
    assert names() == {"two", "three"}
    assert sorted(os.listdir(fresh / admission.LAYOUT)) == [".locks", only_record(fresh).name]
    assert admission.records() == [
        {
            "gpu": GPU,
            "target": TARGET,
            "driver": DRIVER,
            "mla_cupy": admission.__version__,
            "kernels": ["three", "two"],
            "state": admission.IN_FORCE,
        }
    ]


def changed_source(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    source = fresh.parent / "cuda_src" / "common" / "scale.cuh"  # which the kernel includes
    source.write_text(source.read_text().replace("2.0f", "3.0f"))


def missing_source(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    (fresh.parent / "cuda_src" / "generic" / "tiny.cu").unlink()


def other_driver(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device, "nvml_gpus", lambda: [VisibleGpu(GPU, (10, 0), 1 << 37, "590.2")])


def other_version(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "__version__", "9.9.9")


def other_compiler(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission.nvrtc, "identity", lambda path: "another")


def no_compiler(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission.nvrtc, "_candidates", lambda: iter(()))


def prebuilt(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MLA_CUPY_CUBIN_DIR", str(fresh))


def other_options(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MLA_CUPY_LINEINFO", "1")


def other_flags(fresh: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NVRTC_APPEND_FLAGS", "-G")


CHANGES = {
    changed_source: "sources or options changed: one",
    missing_source: "sources or options changed: one",
    other_driver: "driver 580.1, here 590.2",
    other_version: f"mla_cupy {admission.__version__}, here 9.9.9",
    other_compiler: "another compiler",
    no_compiler: "another compiler",
    prebuilt: "another compiler",
    other_options: "sources or options changed: one",
    other_flags: "sources or options changed: one",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_record_holds_under_its_conditions_alone(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    write("one")
    assert names() == {"one"}
    with monkeypatch.context() as patch:
        change(fresh, patch)
        assert names() == set()
        assert [record["state"] for record in admission.records()] == [CHANGES[change]]


def test_another_gpu_has_a_record_of_its_own(fresh: Path) -> None:
    write("one")
    for gpu, target in (("NVIDIA GB200", TARGET), (GPU, "sm_103a"), (f"{GPU} MIG 1g.23gb", TARGET)):
        assert admission.admitted(gpu, target) == frozenset()
        admission.write(Conditions.here(gpu, target), {"two": TINY_REQUEST}, ())
        assert admission.admitted(gpu, target) == {"two"}
    assert names() == {"one"}
    assert len(admission.records()) == 4


def test_a_copy_under_another_name_is_no_record(fresh: Path) -> None:
    """The conditions inside count, not only the name of the file."""
    write("one")
    other = Conditions.here("NVIDIA GB200", TARGET)
    (fresh / admission.LAYOUT / other.file_name).write_bytes(only_record(fresh).read_bytes())
    assert admission.admitted("NVIDIA GB200", TARGET) == frozenset()


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "no kernels": lambda text: '{"conditions": {}}',
    "kernels are no object": lambda text: json.dumps({**json.loads(text), "kernels": ["one"]}),
    "a kernel is no object": lambda text: json.dumps({**json.loads(text), "kernels": {"one": "yes"}}),
    "a condition too many": lambda text: text.replace('"gpu"', '"gpus"'),
    "a path": lambda text: text.replace("generic/tiny.cu", "../tiny.cu"),
    "another entry": lambda text: text.replace("mla_tiny", "mla_tinier"),
    "another digest": lambda text: text.replace(json.loads(text)["kernels"]["one"]["made_of"], "0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_admits_nothing_and_is_mended(fresh: Path, damage: str) -> None:
    write("one")
    path = only_record(fresh)
    path.write_text(DAMAGE[damage](path.read_text()))
    assert names() == set()
    admission.records()
    write("one")
    assert names() == {"one"}


@pytest.mark.parametrize("how", ["file", "directory", "link", "fifo"])
def test_what_another_user_could_have_written_is_not_read(fresh: Path, how: str) -> None:
    write("one")
    path = only_record(fresh)
    if how == "file":
        path.chmod(0o666)
    elif how == "directory":
        path.parent.chmod(0o777)
    else:
        moved = path.rename(path.with_suffix(".moved"))
        path.symlink_to(moved) if how == "link" else os.mkfifo(path)
    assert names() == set()
    assert admission.records() == []


def test_where_nothing_can_be_written(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record in a read-only cache holds; a new one is an error that says so."""
    write("one")
    read_only = cache.Places((fresh / cache.LAYOUT,), None, "cannot be used")
    monkeypatch.setattr(cache, "places", lambda: read_only)
    monkeypatch.setattr(cache, "find_places", lambda: read_only)
    assert names() == {"one"}
    with pytest.raises(OSError, match="no cache directory can be written"):
        write("two")
    assert names() == {"one"}


WRITER = """
import sys
from mla_cupy.runtime import admission, device
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.runtime.device import VisibleGpu
device.nvml_gpus = lambda: [VisibleGpu("NVIDIA B200", (10, 0), 1, "580.1")]
here = admission.Conditions.here("NVIDIA B200", "sm_100a")
request = BuildRequest("mla_tiny", "generic/tiny.cu", "sm_90a", (("MLA_FACTOR", "3.0f"),), "3")
for i in range(20):
    admission.write(here, {f"{sys.argv[1]}{i}": request}, ())
    assert admission.admitted("NVIDIA B200", "sm_100a")
"""


def test_several_writers_lose_nothing(fresh: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name], cwd=REPOSITORY) for name in ("a", "b", "c")]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert names() == {f"{name}{i}" for name in "abc" for i in range(20)}
    assert not list((fresh / admission.LAYOUT).glob(".new-*"))


def test_the_environment_variable(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUPY_ADMISSION", "all")
    assert admission.admitted(GPU, TARGET) == EVERY_KERNEL
    monkeypatch.setenv("MLA_CUPY_ADMISSION", "none")
    write("one")
    assert names() == set()
    monkeypatch.setenv("MLA_CUPY_ADMISSION", "yes")
    with pytest.raises(ArgumentError, match="MLA_CUPY_ADMISSION: got 'yes', expected one of record, all, none"):
        names()


def test_a_gpu_admits_what_its_record_names() -> None:
    gpu = DeviceInfo(0, GPU, (10, 0), 148, 232448, 1, 1)
    assert not gpu.admits("one")
    some = replace(gpu, admitted=frozenset(("one",)))
    assert some.admits("one")
    assert not some.admits("two")
    assert replace(gpu, admitted=EVERY_KERNEL).admits("two")


def test_describing_a_gpu_reads_its_record_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = type("Runtime", (), {"getDeviceProperties": staticmethod(lambda ordinal: PROPERTIES)})
    fake = type("Cupy", (), {"cuda": type("Cuda", (), {"runtime": runtime})})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    write("one")
    device.describe.cache_clear()
    try:
        assert device.describe(0).admitted == {"one"}
        write("two")
        assert device.describe(0).admitted == {"one"}
    finally:
        device.describe.cache_clear()


PROPERTIES = {
    "name": GPU.encode(),
    "major": 10,
    "minor": 0,
    "multiProcessorCount": 148,
    "sharedMemPerBlockOptin": 232448,
    "l2CacheSize": 1 << 27,
    "totalGlobalMem": 1 << 37,
}
