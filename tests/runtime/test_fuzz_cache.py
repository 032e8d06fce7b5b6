"""Caches with anything in them: an entry is read only if it is sound, and can always be replaced."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_kernels import tiny_build

from mla_cupy.runtime import build_info, cache, lock

FILES = ("kernel.cubin", "kernel.ptx", "info.json")
HUGE = 1 << 40
"""Size of a sparse file that must not be read whole."""
TEXTS = ("", "[" * 100_000, '{"a":' * 50_000, "null", "[]", "{}", "1" * 10_000, "\x00" * 64, "{'a': 1}", '"\\ud800"')


def some_json(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold, and NaN."""
    scalars: list[Any] = [None, True, False, 0, -1, 1 << 80, 0.5, float("nan"), float("inf"), "", "x", "\ud800", "12"]
    if depth < 3 and rng.random() < 0.4:
        size = rng.randrange(4)
        if rng.random() < 0.5:
            return [some_json(rng, depth + 1) for _ in range(size)]
        return {rng.choice(("threads", "entry", "a", "")): some_json(rng, depth + 1) for _ in range(size)}
    return rng.choice(scalars)


def content_of(path: Path) -> bytes:
    """The content of a file that an earlier change has left readable."""
    if not path.is_file() or path.stat().st_size == HUGE:
        raise OSError("nothing to change")
    return path.read_bytes()


def fields_of(path: Path) -> dict[str, Any]:
    """Fields of build info, if an earlier change has left any."""
    content = content_of(path)
    if content.count(b"[") + content.count(b"{") > 1000 or not isinstance(fields := json.loads(content), dict):
        raise ValueError("nothing to change")
    return fields


def change_info(rng: random.Random, entry: Path) -> None:
    """Fields that are missing, wrong or new; the digests stay right."""
    path = entry / "info.json"
    fields = fields_of(path)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*fields, "extra"])
        if rng.random() < 0.3:
            fields.pop(name, None)
        else:
            fields[name] = some_json(rng)
    path.write_text(json.dumps(fields))


def change_text(rng: random.Random, entry: Path) -> None:
    path = entry / rng.choice(FILES)
    content_of(path)
    path.write_text(rng.choice(TEXTS))


def change_bytes(rng: random.Random, entry: Path) -> None:
    """Bits of a file, its end, or its size."""
    path = entry / rng.choice(FILES)
    content = bytearray(content_of(path))
    how = rng.randrange(3)
    if how == 0:
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == 1:
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        os.truncate(path, HUGE)


def change_cubin(rng: random.Random, entry: Path) -> None:
    """Another cubin, with the digests of it: its ELF tables are what is read."""
    content = bytearray(content_of(entry / "kernel.cubin"))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(64) if rng.random() < 0.5 else rng.randrange(len(content))
        content[at : at + 8] = rng.choice((rng.randbytes(8), b"\xff" * 8, bytes(8)))
    (entry / "kernel.cubin").write_bytes(content)
    fields = fields_of(entry / "info.json")
    fields["sha256"] = cache._digests(bytes(content), content_of(entry / "kernel.ptx"))
    (entry / "info.json").write_text(json.dumps(fields))


def change_kind(rng: random.Random, entry: Path) -> None:
    """Something else in place of a file or of the entry."""
    path = entry / rng.choice((*FILES, ""))
    if path == entry:
        shutil.rmtree(path)
    else:
        path.unlink()
    put(rng, path)


def put(rng: random.Random, path: Path) -> None:
    """Anything but a regular file of ours, or nothing."""
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir(mode=rng.choice((0o700, 0o777, 0o000)))
    elif kind == 2:
        nothing = path.parent / "nothing"  # what is written through the link stays here
        path.symlink_to(rng.choice((str(nothing), "/dev/zero", "/proc/self/mem", path.name, "..")))
    elif kind == 3:
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # the path of a socket has at most 107 bytes
            made.bind(path.name)
    elif kind == 4:
        path.touch(rng.choice((0o600, 0o666, 0o000)))
    elif kind == 5 and os.geteuid() == 0:
        path.touch()
        os.chown(path, 12345, 12345)


def change_mode(rng: random.Random, entry: Path) -> None:
    path = entry / rng.choice((*FILES, ""))
    path.chmod(rng.randrange(0o1000))


def change_lock(rng: random.Random, entry: Path) -> None:
    """Whatever lies where the lock should."""
    locks = entry.parent / ".locks"
    if rng.random() < 0.3:
        shutil.rmtree(locks, ignore_errors=True)
        put(rng, locks)
    else:
        locks.mkdir(mode=0o700, exist_ok=True)
        put(rng, locks / entry.name)


CHANGES: tuple[Callable[[random.Random, Path], None], ...] = (
    change_info,
    change_text,
    change_bytes,
    change_cubin,
    change_kind,
    change_mode,
    change_lock,
)


def fuzz(directory: Path, seed: int, turns: int) -> None:
    made = tiny_build()
    for turn in range(turns):
        rng = random.Random(f"{seed} {turn}")
        entry = directory / f"cache-{turn}" / "entry"
        cache.write(entry, made, "key")
        what = []
        for change in rng.choices(CHANGES, k=rng.randint(1, 2)):
            try:
                change(rng, entry)
                what.append(change.__name__)
            except (OSError, ValueError, KeyError, IndexError):
                pass  # a change before it has taken what it would change
        try:
            found = cache.read(entry)
            if found is not None:
                assert build_info.problem(found.info, found.cubin, found.ptx) == ""
            with lock.building(entry):
                cache.write(entry, made, "key")
            again = cache.read(entry)
            assert again is not None
            assert again.facts == made.facts
            assert again.info["image_key"] == "key"
        except BaseException as error:
            raise AssertionError(f"seed {seed}, turn {turn}: {', '.join(what)}") from error
        os.chdir(directory)
        shutil.rmtree(entry.parent)


@pytest.fixture
def directory(cuda_src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def silent() -> Any:
    """Distrust is said by a warning: here it is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def test_fuzz(directory: Path) -> None:
    fuzz(directory, seed=1, turns=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_fuzz_long(directory: Path, seed: int) -> None:
    fuzz(directory, seed, turns=2000)
