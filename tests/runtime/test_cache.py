"""Entries on disk: where, under which key, all at once, and what damage does."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_kernels import REPOSITORY, TINY_REQUEST, tiny_build

from mla_cupy.runtime import cache, loader, nvrtc, worker
from mla_cupy.runtime.build import Build, compile_kernel


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*") if not path.name.startswith("."))


def name() -> str:
    return cache.entry_name(TINY_REQUEST, nvrtc.find_nvrtc())


def test_write_then_read(cuda_src: Path, tmp_path: Path) -> None:
    some = tiny_build()
    cache.write(tmp_path / "a" / "entry", some, "key")
    found = cache.read(tmp_path / "a" / "entry")
    assert found is not None
    assert (found.cubin, found.ptx, found.info["image_key"]) == (some.cubin, some.ptx, "key")
    assert cache.read(tmp_path / "a" / "none") is None
    assert os.listdir(tmp_path / "a") == ["entry"]


def test_a_sound_entry_stays_and_another_is_replaced(cuda_src: Path, tmp_path: Path) -> None:
    some = tiny_build()
    entry = tmp_path / "entry"

    def kept() -> bytes:
        found = cache.read(entry)
        assert found is not None
        return found.ptx

    cache.write(entry, some, "key")
    cache.write(entry, replace(some, ptx=b"later"), "key")
    assert kept() == some.ptx
    cache.write(entry, replace(some, ptx=b"other"), "other key")
    assert kept() == b"other"
    cache.write(entry, Build(some.cubin, b"newer", {**some.info, "nvrtc": "13.5.0"}), "other key")
    assert kept() == b"newer"


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "info.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_damage_is_seen_and_repaired(fresh: Path, file: str, damage: str) -> None:
    good = loader.obtain(TINY_REQUEST)
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
    if (file, damage) != ("info.json", "changed"):  # a changed word of the info's own prose is harmless
        assert cache.read(entry) is None
    loader.forget()
    assert loader.obtain(TINY_REQUEST).cubin == good.cubin
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
    before = loader.obtain(TINY_REQUEST)
    (cuda_src / "common" / "scale.cuh").write_text("#pragma once\n__device__ float scale() { return 4.0f; }\n")
    loader.forget()
    assert loader.obtain(TINY_REQUEST).cubin != before.cubin
    assert len(entries(fresh / cache.LAYOUT)) == 2


def test_eight_processes_on_a_cold_cache(fresh: Path) -> None:
    code = (
        "import hashlib, tiny_kernels; from mla_cupy.runtime import loader\n"
        "print(hashlib.sha256(loader.obtain(tiny_kernels.TINY_REQUEST).cubin).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])}
    command = [sys.executable, "-W", "error", "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert [err for _, err in outputs] == [""] * 8
    assert len({out for out, _ in outputs}) == 1
    assert len(entries(fresh / cache.LAYOUT)) == 1


def test_writers_without_a_lock_leave_one_sound_entry(cuda_src: Path, tmp_path: Path) -> None:
    """The lock only saves work: the same with eight processes that write as fast as they can."""
    some = tiny_build()
    (tmp_path / "some").write_bytes(pickle.dumps(some))
    code = f"""
import contextlib, pickle
from pathlib import Path
from mla_cupy.runtime import cache
some = pickle.loads(Path({str(tmp_path / "some")!r}).read_bytes())
entry = Path({str(tmp_path / "entries" / "entry")!r})
for turn in range(40):
    with contextlib.suppress(OSError):  # given up: the seven others were always faster
        cache.write(entry, some, "key")
    found = cache.read(entry)
    assert found is None or found.cubin == some.cubin
    if turn % 4 == 0:
        with contextlib.suppress(OSError):
            (entry / "kernel.cubin").write_bytes(b"torn")
"""
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    assert [process.communicate(timeout=300)[1] for process in processes] == [b""] * 8
    cache.write(tmp_path / "entries" / "entry", some, "key")
    assert cache.read(tmp_path / "entries" / "entry").cubin == some.cubin  # type: ignore[union-attr]
    assert os.listdir(tmp_path / "entries") == ["entry"]


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
    good = loader.obtain(TINY_REQUEST)
    loader.forget()
    make_foreign(fresh, monkeypatch)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.warns(RuntimeWarning, match=r"belongs to another user\): .*set MLA_CUPY_CACHE_DIR"):
        found = cache.places()
    assert fresh / cache.LAYOUT not in found.read
    if os.geteuid() == 0:
        assert found.write == tmp_path / "tmp" / "mla_cupy-0" / cache.LAYOUT
        assert (tmp_path / "tmp" / "mla_cupy-0").stat().st_mode & 0o777 == 0o700
    assert loader.obtain(TINY_REQUEST).cubin == good.cubin


def test_a_foreign_or_open_temporary_directory_is_not_used(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"mla_cupy-{os.geteuid()}"
    assert cache._temporary() == place
    place.chmod(0o770)
    assert cache._temporary() is None
    shutil.rmtree(place)
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
    loader.obtain(TINY_REQUEST)
    loader.forget()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(fresh) and real(path, mode))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(worker, "can_spawn", lambda: pytest.fail("it was compiled again"))
    with pytest.warns(RuntimeWarning, match=r"cannot be used \(.*Permission denied"):
        loader.obtain(TINY_REQUEST)
    monkeypatch.undo()


@pytest.mark.parametrize("blocked", ["/proc/mla_cupy", "FILE/cache"])
def test_a_cache_that_cannot_be_made(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    """Nor can root make a directory there: the directory of a temporary name serves, after one warning."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", blocked.replace("FILE", str(tmp_path / "file")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        loader.obtain(TINY_REQUEST)
    loader.forget()
    loader.obtain(TINY_REQUEST)  # a second warning would be an error
    assert len(entries(tmp_path / f"mla_cupy-{os.geteuid()}" / cache.LAYOUT)) == 1


def test_no_writable_directory_at_all(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.warns(RuntimeWarning, match="kept in memory only"):
        made = loader.obtain(TINY_REQUEST)
    assert made.cubin == compile_kernel(TINY_REQUEST).cubin
    assert loader.obtain(TINY_REQUEST) is made
    assert cache.cache_dir() is None
    worker.start([TINY_REQUEST])  # nothing to put it into: no child
    assert worker._background == []


def test_a_disk_that_fills_up_costs_only_the_cache(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write", full)
    found = cache.places()
    made, cache_error = worker.build_here(TINY_REQUEST, nvrtc.find_nvrtc(), found.read, found.write)
    assert made.facts["threads"] == 128
    assert "got No space left on device, expected room for the compiled kernels; set MLA_CUPY_CACHE_DIR" in cache_error


def test_default_place_is_the_users_cache(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CUPY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "mla_cupy" / cache.LAYOUT


def test_usage_and_clear(fresh: Path) -> None:
    loader.obtain(TINY_REQUEST)
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
    code = "import tiny_kernels; from mla_cupy.runtime import loader; loader.obtain(tiny_kernels.TINY_REQUEST)"
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
