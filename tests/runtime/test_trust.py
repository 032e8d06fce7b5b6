"""Entries are code: what another user could have written is not read, and what we write no other user can change."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_kernels import TINY_REQUEST, tiny_build

from mla_cupy.runtime import cache, env, loader, nvrtc, trust, worker

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def entry(fresh: Path) -> Path:
    """A sound entry in the cache."""
    name = cache.entry_name(TINY_REQUEST, nvrtc.find_nvrtc())
    path = cache.places().read[0] / name
    cache.write(path, tiny_build(), cache.image_key(TINY_REQUEST))
    return path


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory for what falls back to one."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"mla_cupy-{os.geteuid()}" / cache.LAYOUT


@pytest.fixture(params=[0o000, 0o002, 0o077, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_what_we_write_is_ours_alone_whatever_the_umask(fresh: Path, umask: int) -> None:
    loader.obtain(TINY_REQUEST)
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert (fresh / cache.LAYOUT).stat().st_mode & 0o777 == 0o700
    assert [path for path in fresh.rglob("*") if path.stat().st_mode & 0o022] == []
    loader.forget()
    assert worker.cached(TINY_REQUEST) is not None


def test_images_for_others_are_not_writable_by_them(cuda_src: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache.write(tmp_path / "out" / "entry", tiny_build(), "key")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {0o755, 0o644}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
@pytest.mark.parametrize("which", ["directory", "layout"])
def test_a_cache_that_others_can_write_is_not_used(entry: Path, own_tmp: Path, mode: int, which: str) -> None:
    directory = entry.parent if which == "layout" else entry.parent.parent
    directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"not trusted .*can be written by other users.*chmod go-w {directory}\)"):
        found = cache.places()
    assert cache.places() == found  # a second warning would be an error
    assert (found.read, found.write) == ((own_tmp,), own_tmp)
    assert cache.usage() == (0, 0)
    directory.chmod(0o700)
    assert cache.places().problem == ""


@pytest.mark.parametrize("what", ["file", "in a file", "loop", "dangling link", "foreign", "foreign link"])
def test_no_remedy_is_named_that_does_not_help(
    fresh: Path, tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place = tmp_path / "place"
    if what.startswith("foreign"):
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        place.symlink_to(fresh) if what.endswith("link") else place.mkdir()
        os.chown(place, 12345, 12345, follow_symlinks=False)
    elif what.endswith("file"):
        place.write_text("")
    else:
        place.symlink_to(place if what == "loop" else tmp_path / "nothing")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(place / "deeper" if what == "in a file" else place))
    problem = cache.find_places().problem
    assert problem.endswith(f"{own_tmp.parent} is used; set MLA_CUPY_CACHE_DIR to another directory")


def test_the_home_directory_in_a_path(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("CACHE_DIR", "CUBIN_DIR", "NVRTC", "CUDA_SRC"):
        monkeypatch.setenv(f"MLA_CUPY_{name}", "~/kernels")
        assert env.get(name) == str(tmp_path / "kernels")
    assert cache.cache_dir() == tmp_path / "kernels" / cache.LAYOUT
    assert not (tmp_path / "~").exists()


def test_a_sticky_directory_is_used(entry: Path) -> None:
    """Others can add to it, as to /tmp, but what they add is theirs."""
    entry.parent.parent.chmod(0o1777)
    assert cache.places().problem == ""
    assert worker.cached(TINY_REQUEST) is not None


@pytest.mark.parametrize("file", ["", "kernel.cubin", "kernel.ptx", "info.json"])
@pytest.mark.parametrize("fault", ["group", "world", "foreign", "link"])
def test_an_entry_that_others_could_have_written_is_built_again(entry: Path, file: str, fault: str) -> None:
    path = entry / file
    if fault == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, 12345)
    elif fault == "link":
        elsewhere = entry.parent.parent / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    else:
        path.chmod(path.stat().st_mode | (0o020 if fault == "group" else 0o002))
    if fault == "link":
        assert cache.read(entry) is None
    else:
        with pytest.warns(RuntimeWarning, match=r"are ignored, since a path .*: they are rebuilt"):
            assert cache.read(entry) is None
        assert cache.read(entry) is None  # a second warning would be an error
    assert loader.obtain(TINY_REQUEST).cubin == tiny_build().cubin
    assert cache.read(entry) is not None
    assert not path.is_symlink()


def test_a_link_to_a_cache_of_our_own_is_used(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "link"))
    assert cache.places().problem == ""
    (tmp_path / "large" / cache.LAYOUT).rename(tmp_path / "moved")
    (tmp_path / "large" / cache.LAYOUT).symlink_to(tmp_path / "moved")
    assert "Not a directory" in cache.find_places().problem


@pytest.mark.parametrize("where", ["directory", "entry", "file"])
def test_prebuilt_images_that_others_can_write_are_not_used(
    entry: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    images = entry.parent.parent / "images"
    cache.write(images / TINY_REQUEST.name, tiny_build(), cache.image_key(TINY_REQUEST))
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(images))
    assert cache.prebuilt(TINY_REQUEST) is not None
    image = images / TINY_REQUEST.name
    {"directory": images, "entry": image, "file": image / "kernel.cubin"}[where].chmod(0o777)
    with pytest.warns(RuntimeWarning) as said:
        assert cache.prebuilt(TINY_REQUEST) is None
    assert any("can be written by other users" in str(each.message) for each in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_prebuilt_images_belong_to_the_owner_of_their_directory(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the administrator of the machine may own them, besides the user."""
    images = entry.parent.parent / "images"
    cache.write(images / TINY_REQUEST.name, tiny_build(), cache.image_key(TINY_REQUEST))
    monkeypatch.setenv("MLA_CUPY_CUBIN_DIR", str(images))
    for path in (images, *images.rglob("*")):
        os.chown(path, 12345, 12345)
    assert cache.prebuilt(TINY_REQUEST) is not None
    os.chown(images / TINY_REQUEST.name / "kernel.cubin", 12346, 12346)
    with pytest.warns(RuntimeWarning):
        assert cache.prebuilt(TINY_REQUEST) is None


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "info.json", ""])
def test_a_fifo_is_no_file(entry: Path, python: Python, file: str) -> None:
    """Opened in another process, since opening a FIFO waits for ever."""
    path = entry / file
    path.rename(entry.parent.parent / "away")
    os.mkfifo(path)
    done = python("import tiny_kernels; from mla_cupy.runtime import loader; loader.obtain(tiny_kernels.TINY_REQUEST)")
    assert (done.returncode, done.stderr) == (0, "")
    assert cache.read(entry) is not None


def test_a_fifo_for_a_lock_does_not_stop_us(entry: Path, python: Python) -> None:
    locks = entry.parent / ".locks"
    locks.mkdir(mode=0o700)
    os.mkfifo(locks / entry.name)
    (entry / "info.json").unlink()
    done = python("import tiny_kernels; from mla_cupy.runtime import loader; loader.obtain(tiny_kernels.TINY_REQUEST)")
    assert (done.returncode, done.stderr) == (0, "")
    assert cache.read(entry) is not None


def test_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch(0o600)
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="File too large"):
        trust.read_file(path, trust.trusted_owners(), 1 << 20)


def test_a_link_to_itself_is_no_directory(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("MLA_CUPY_CACHE_DIR", str(tmp_path / "loop"))
    assert "Not a directory" in cache.find_places().problem
