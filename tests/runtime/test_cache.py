"""Entries on disk: where, under which key, all at once, and what damage does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY, TINY_REQUEST

from mla_cupy.runtime import cache, kernels, nvrtc, worker
from mla_cupy.runtime.build import Build, compile_kernel

SOME = Build(b"cubin", b"ptx", {"nvrtc": "12.9.86", "options": ["-a"], "facts": {}})


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*") if not path.name.startswith("."))


def name() -> str:
    return cache.entry_name(TINY_REQUEST, nvrtc.find_nvrtc())


def test_write_then_read(tmp_path: Path) -> None:
    cache.write(tmp_path / "a" / "entry", SOME, "key")
    found = cache.read(tmp_path / "a" / "entry")
    assert found is not None
    assert (found.cubin, found.ptx, found.record["image_key"]) == (b"cubin", b"ptx", "key")
    assert cache.read(tmp_path / "a" / "none") is None
    assert os.listdir(tmp_path / "a") == ["entry"]


def test_a_sound_entry_stays_and_another_is_replaced(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    cache.write(entry, SOME, "key")
    cache.write(entry, replace(SOME, cubin=b"later"), "key")
    assert cache.read(entry).cubin == b"cubin"  # type: ignore[union-attr]
    cache.write(entry, replace(SOME, cubin=b"other"), "other key")
    assert cache.read(entry).cubin == b"other"  # type: ignore[union-attr]
    cache.write(entry, Build(b"newer", b"", {**SOME.record, "nvrtc": "13.5.37"}), "other key")
    assert cache.read(entry).cubin == b"newer"  # type: ignore[union-attr]


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "record.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damage_is_seen_and_repaired(fresh: Path, file: str, damage: str) -> None:
    good = kernels.obtain(TINY_REQUEST)
    (entry,) = entries(fresh / cache.LAYOUT)
    content = (entry / file).read_bytes()
    if damage == "missing":
        (entry / file).unlink()
    else:
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 0x20])
        (entry / file).write_bytes(
            content[:middle] + (b"" if damage == "truncated" else flipped + content[middle + 1 :])
        )
    if (file, damage) != ("record.json", "changed"):  # a changed word of the record's own prose is harmless
        assert cache.read(entry) is None
    kernels.forget()
    assert kernels.obtain(TINY_REQUEST).cubin == good.cubin
    assert cache.read(entry).cubin == good.cubin  # type: ignore[union-attr]
    assert entries(fresh / cache.LAYOUT) == [entry]


def test_the_key_holds_every_input(fresh: Path, cuda_src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name()}

    def differs() -> None:
        assert name() not in names
        names.add(name())

    monkeypatch.setenv("MLA_CUPY_LINEINFO", "1")
    differs()
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-G")
    differs()
    monkeypatch.setattr(nvrtc, "identity", lambda path: "another NVRTC")
    differs()
    (cuda_src / "common" / "scale.cuh").write_text("#pragma once\n__device__ float scale() { return 4.0f; }\n")
    differs()
    for other in (
        replace(TINY_REQUEST, arch="sm_100a"),
        replace(TINY_REQUEST, defines=(("MLA_FACTOR", "4.0f"),)),
        replace(TINY_REQUEST, entry="mla_other"),
    ):
        assert cache.entry_name(other, nvrtc.find_nvrtc()) not in names


def test_a_changed_header_is_compiled_again(fresh: Path, cuda_src: Path) -> None:
    before = kernels.obtain(TINY_REQUEST)
    (cuda_src / "common" / "scale.cuh").write_text("#pragma once\n__device__ float scale() { return 4.0f; }\n")
    kernels.forget()
    assert kernels.obtain(TINY_REQUEST).cubin != before.cubin
    assert len(entries(fresh / cache.LAYOUT)) == 2


def test_eight_processes_on_a_cold_cache(fresh: Path) -> None:
    code = (
        "import hashlib, tiny_kernels; from mla_cupy.runtime import kernels\n"
        "print(hashlib.sha256(kernels.obtain(tiny_kernels.TINY_REQUEST).cubin).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])}
    command = [sys.executable, "-W", "error", "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert [err for _, err in outputs] == [""] * 8
    assert len({out for out, _ in outputs}) == 1
    assert len(entries(fresh / cache.LAYOUT)) == 1


def test_writers_without_a_lock_leave_one_sound_entry(tmp_path: Path) -> None:
    """The lock only saves work: the same with eight processes that write as fast as they can."""
    code = f"""
import contextlib
from pathlib import Path
from mla_cupy.runtime import cache
from mla_cupy.runtime.build import Build
entry = Path({str(tmp_path)!r}) / "entry"
for turn in range(40):
    with contextlib.suppress(OSError):  # given up: the seven others were always faster
        cache.write(entry, Build(b"cubin", b"ptx", {{"nvrtc": "1", "options": []}}), "key")
    found = cache.read(entry)
    assert found is None or found.cubin == b"cubin"
    if turn % 4 == 0:
        with contextlib.suppress(OSError):
            (entry / "kernel.cubin").write_bytes(b"torn")
"""
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    assert [process.communicate(timeout=60)[1] for process in processes] == [b""] * 8
    cache.write(tmp_path / "entry", Build(b"cubin", b"ptx", {"nvrtc": "1", "options": []}), "key")
    assert cache.read(tmp_path / "entry").cubin == b"cubin"  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == ["entry"]


def make_foreign(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a directory to another user; where we are not root, become another one in the eyes of the cache."""
    if os.geteuid() == 0:
        os.chown(directory, 12345, 12345)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


def test_a_foreign_cache_is_neither_read_nor_written(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = kernels.obtain(TINY_REQUEST)
    kernels.forget()
    make_foreign(fresh, monkeypatch)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.warns(RuntimeWarning, match=r"belongs to another user: .*set MLA_CUPY_CACHE_DIR"):
        found = cache.places()
    assert fresh / cache.LAYOUT not in found.read
    if os.geteuid() == 0:
        assert found.write == tmp_path / "tmp" / "mla_cupy-0" / cache.LAYOUT
        assert (tmp_path / "tmp" / "mla_cupy-0").stat().st_mode & 0o777 == 0o700
    assert kernels.obtain(TINY_REQUEST).cubin == good.cubin


def test_a_foreign_or_open_temporary_directory_is_not_used(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"mla_cupy-{os.geteuid()}"
    assert cache._temporary() == place
    place.chmod(0o770)
    assert cache._temporary() is None
    place.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    assert cache._temporary() is None
    place.unlink()
    place.mkdir(mode=0o700)
    make_foreign(place, monkeypatch)
    if os.geteuid() == 0:
        assert cache._temporary() is None


def test_a_read_only_cache_is_still_read(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the answer of the operating system is replaced."""
    kernels.obtain(TINY_REQUEST)
    kernels.forget()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(fresh) and real(path, mode))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(worker, "can_spawn", lambda: pytest.fail("it was compiled again"))
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        kernels.obtain(TINY_REQUEST)
    monkeypatch.undo()


@pytest.mark.parametrize("blocked", ["/proc/mla_cupy", "FILE/cache"])
def test_a_cache_that_cannot_be_made(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """Nor can root make a directory there: the directory of a temporary name serves, after one warning."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", blocked.replace("FILE", str(tmp_path / "file")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        kernels.obtain(TINY_REQUEST)
    kernels.forget()
    kernels.obtain(TINY_REQUEST)  # a second warning would be an error
    assert len(entries(tmp_path / f"mla_cupy-{os.geteuid()}" / cache.LAYOUT)) == 1


def test_no_writable_directory_at_all(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.warns(RuntimeWarning, match="kept in memory only"):
        made = kernels.obtain(TINY_REQUEST)
    assert made.cubin == compile_kernel(TINY_REQUEST).cubin
    assert kernels.obtain(TINY_REQUEST) is made
    assert cache.cache_dir() is None
    worker.start([TINY_REQUEST])  # nothing to put it into: no child
    assert worker._background == []


def test_a_disk_that_fills_up_costs_only_the_cache(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write", full)
    found = cache.places()
    made, stored = worker.build_here(TINY_REQUEST, nvrtc.find_nvrtc(), found.read, found.write)
    assert made.facts["threads"] == 128
    assert not stored


def test_default_place_is_the_users_cache(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CUPY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "mla_cupy" / cache.LAYOUT


def test_usage_and_clear(fresh: Path) -> None:
    kernels.obtain(TINY_REQUEST)
    count, size = cache.usage()
    assert count == 1
    assert size > 1000
    (fresh / "mine.txt").write_text("not a kernel")
    assert cache.clear() == (count, size)
    assert cache.usage() == (0, 0)
    assert (fresh / "mine.txt").exists()


def test_unwritable_home_in_a_fresh_process(
    cuda_src: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = "import tiny_kernels; from mla_cupy.runtime import kernels; kernels.obtain(tiny_kernels.TINY_REQUEST)"
    done = python(
        "import warnings; warnings.simplefilter('always')\n" + code,
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null/cache",
        MLA_CUPY_CACHE_DIR="",
        TMPDIR=str(cuda_src.parent),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert entries(cuda_src.parent / f"mla_cupy-{os.geteuid()}" / cache.LAYOUT)
