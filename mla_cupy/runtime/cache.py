"""Where compiled kernels are kept on disk.

An entry is a directory with `kernel.cubin`, `kernel.ptx` and `record.json`. It is written under another name and
renamed, so that its three files appear at once and belong together whoever else is writing; the record holds their
digests, so damage is seen and the entry built again. No lock is needed for that; the one there is saves work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.runtime import env, nvrtc, sources
from mla_cupy.runtime.build import Build, BuildRequest, options

logger = logging.getLogger("mla_cupy.jit")

LAYOUT = "kernels-v1"
"""The directory of entries inside a cache directory; its number changes when the meaning of an entry does."""

_CUBIN, _PTX, _RECORD = "kernel.cubin", "kernel.ptx", "record.json"
_LOCK_SECONDS = 120.0
_warned: set[str] = set()


@dataclass(frozen=True)
class Places:
    """Directories of entries: those to read, and the one to write (None: nothing is writable)."""

    read: tuple[Path, ...]
    write: Path | None


def places() -> Places:
    """Where entries are looked for and written.

    `MLA_CUPY_CACHE_DIR`, or else the user's cache directory. If that cannot be written, a directory of our own under
    the temporary one as well, and one warning. Only directories of this user or of root are trusted: an entry is code.
    """
    first = Path(given) if (given := env.get("CACHE_DIR")) else _user_cache()
    problem = _problem(first)
    if not problem:
        return Places((first / LAYOUT,), first / LAYOUT)
    readable = (first / LAYOUT,) if _trusted(first) else ()
    second = _temporary()
    where = f"{second} is used" if second else "kernels are kept in memory only"
    warn_once(f"the kernel cache {first} {problem}: {where}; set MLA_CUPY_CACHE_DIR to a directory that you can write")
    return Places((*readable, second / LAYOUT), second / LAYOUT) if second else Places(readable, None)


def cache_dir() -> Path | None:
    """The directory that entries are written to; None where nothing is writable."""
    return places().write


def image_key(request: BuildRequest) -> str:
    """What a cubin is an image of, whichever compiler made it: sources, entry, target and macros."""
    digest = sources.digest(sources.gather(request.source))
    return _hash([digest, request.entry, request.source, request.arch, request.defines])


def entry_name(request: BuildRequest, nvrtc_path: str) -> str:
    """The directory name of a request's entry: every input of the compilation is in it."""
    key = _hash([image_key(request), options(request), nvrtc.identity(nvrtc_path), env.nvrtc_flags()])
    return f"{request.name}-{key[:24]}"


def read(entry: Path) -> Build | None:
    """The build in an entry; None where there is none, or a damaged one."""
    try:
        record = json.loads((entry / _RECORD).read_bytes())
        cubin, ptx = (entry / _CUBIN).read_bytes(), (entry / _PTX).read_bytes()
        if record["sha256"] == _digests(cubin, ptx):
            return Build(cubin, ptx, record)
        problem = "its digest is wrong"
    except FileNotFoundError:
        if not entry.exists():
            return None
        problem = "a file is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    logger.info("cache entry %s is damaged: %s", entry, problem)
    return None


def write(entry: Path, build: Build, key: str) -> None:
    """Write an entry, all of it at once; a sound one of the same inputs stays, any other is replaced.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex
    fresh, old = entry.parent / f".new-{unique}", entry.parent / f".old-{unique}"
    record = {**build.record, "image_key": key, "sha256": _digests(build.cubin, build.ptx)}
    try:
        fresh.mkdir()
        (fresh / _CUBIN).write_bytes(build.cubin)
        (fresh / _PTX).write_bytes(build.ptx)
        (fresh / _RECORD).write_text(json.dumps(record, indent=1) + "\n")
        for _ in range(3):  # another process may put its entry there in between
            if _equal(read(entry), record):
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry, old)
            with contextlib.suppress(OSError):
                os.rename(fresh, entry)
                return
            shutil.rmtree(old, ignore_errors=True)
        raise OSError(f"cannot put {entry} in place")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def prebuilt(request: BuildRequest) -> Build | None:
    """The build that `MLA_CUPY_CUBIN_DIR` holds for `request`.

    It is matched by sources, target and macros and not by compiler, because images are built elsewhere.
    """
    given = env.get("CUBIN_DIR")
    if not given:
        return None
    entry = Path(given) / request.name
    if not entry.is_dir():
        if not Path(given).is_dir():
            warn_once(f"MLA_CUPY_CUBIN_DIR: {given} is not a directory; it is ignored")
        return None
    build = read(entry)
    if build is not None and build.record.get("image_key") == image_key(request):
        return build
    state = "is damaged" if build is None else "was built from other sources"
    warn_once(f"MLA_CUPY_CUBIN_DIR: {entry} {state}; it is ignored, build it again with `mla-cupy compile --out`")
    return None


def usage() -> tuple[int, int]:
    """How many entries there are, and their bytes."""
    files = [file for directory in dict.fromkeys(places().read) for file in directory.glob("*/*") if file.is_file()]
    return sum(file.name == _RECORD for file in files), sum(file.stat().st_size for file in files)


def clear() -> tuple[int, int]:
    """Delete every entry that we may delete; returns how many, and their bytes."""
    before = usage()
    for directory in dict.fromkeys(places().read):
        shutil.rmtree(directory, ignore_errors=True)
    after = usage()
    return before[0] - after[0], before[1] - after[1]


@contextlib.contextmanager
def building(entry: Path | None) -> Iterator[None]:
    """Let one process at a time build an entry, so that eight that start together do not do the same work.

    Only a courtesy: it gives up after two minutes, and where the file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        if entry is not None:
            with contextlib.suppress(OSError):
                locks = entry.parent / ".locks"
                locks.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(locks / entry.name, "w"))
                _lock(file.fileno())
        yield


def warn_once(message: str) -> None:
    """Say something about the cache, once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"mla_cupy: {message}", RuntimeWarning, stacklevel=2)


def _lock(descriptor: int) -> None:
    end = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < end:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
    return None


def _user_cache() -> Path:
    try:
        import platformdirs
    except ImportError:  # a source tree without its dependencies: what platformdirs says on Linux
        return Path(env.user_cache_home()) / "mla_cupy"
    return Path(platformdirs.user_cache_dir("mla_cupy", appauthor=False))


def _temporary() -> Path | None:
    """Our own directory under the temporary one, which anybody may write: it must be ours, real and private."""
    try:
        path = Path(tempfile.gettempdir()) / f"mla_cupy-{os.geteuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return path if private and os.access(path, os.W_OK | os.X_OK) else None


def _problem(path: Path) -> str:
    """Why entries cannot be written to `path`, or ""."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not _trusted(path):
        return "belongs to another user"
    layout = path / LAYOUT
    if not os.access(layout if layout.exists() else path, os.W_OK | os.X_OK):
        return "cannot be written"
    return ""


def _trusted(path: Path) -> bool:
    try:
        return all(place.stat().st_uid in (os.geteuid(), 0) for place in (path, path / LAYOUT) if place.exists())
    except OSError:
        return False


def _equal(build: Build | None, record: dict[str, Any]) -> bool:
    """Whether a build has the same inputs as the one of `record`."""
    return build is not None and all(
        build.record.get(name) == record[name] for name in ("image_key", "nvrtc", "options")
    )


def _digests(cubin: bytes, ptx: bytes) -> dict[str, str]:
    return {_CUBIN: hashlib.sha256(cubin).hexdigest(), _PTX: hashlib.sha256(ptx).hexdigest()}


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
