"""Disk cache of compiled kernels.

An entry is a directory with `kernel.cubin`, `kernel.ptx` and `info.json`. It is written under another name and
renamed, so that its three files appear at once and belong together even if another process is writing; the info
holds their digests, so damage is seen and the entry built again. That needs no lock; the lock saves double work.

An entry is code, so directories, entries and files that another user could have written are not read (see `trust`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_cupy.runtime import build_info, env, nvrtc, sources, trust
from mla_cupy.runtime.build import Build, BuildRequest, options

logger = logging.getLogger("mla_cupy.jit")

LAYOUT = "kernels-v1"
"""The directory of entries inside a cache directory; its number changes when the meaning of an entry does."""

_CUBIN, _PTX, _INFO = "kernel.cubin", "kernel.ptx", "info.json"
_MAX_RECORD_BYTES, _MAX_IMAGE_BYTES = 1 << 20, 1 << 28
_UNTRUSTED_REMEDY = "they are rebuilt; delete the old ones with `mla-cupy clear-cache`"
_warned: set[str] = set()


@dataclass(frozen=True)
class Places:
    """Directories of entries: those to read, and the one to write (None: nothing is writable).

    `problem` explains why it is not the requested one, and what to do.
    """

    read: tuple[Path, ...]
    write: Path | None
    problem: str = ""


def places() -> Places:
    """Directories in which entries are looked for and written. Warns once if they are not those asked for."""
    found = find_places()
    if found.problem:
        warn_once(found.problem)
    return found


def find_places() -> Places:
    """Directories in which entries are looked for and written, without a warning.

    `MLA_CUPY_CACHE_DIR`, or else the user's cache directory. If that cannot be written or is not trusted, a directory
    of our own under the temporary one.
    """
    first = Path(given) if (given := env.get("CACHE_DIR")) else _user_cache()
    try:
        _prepare(first)
        return Places((first / LAYOUT,), first / LAYOUT)
    except OSError as error:
        problem = error
    readable = (first / LAYOUT,) if _is_trusted(first) else ()
    what = "is not trusted" if isinstance(problem, trust.UntrustedError) else "cannot be used"
    second = _temporary()
    where = f"{second} is used" if second else "kernels are kept in memory only"
    remedies = (trust.remedy(problem), "set MLA_CUPY_CACHE_DIR to another directory")
    why = f"{problem.filename}: {problem.strerror}"
    text = f"the kernel cache {first} {what} ({why}): {where}; {', or '.join(filter(None, remedies))}"
    return Places((*readable, second / LAYOUT), second / LAYOUT, text) if second else Places(readable, None, text)


def cache_dir() -> Path | None:
    """The directory that entries are written to; None where nothing is writable."""
    return places().write


def image_key(request: BuildRequest) -> str:
    """Key of a cubin's inputs, whichever compiler made it: sources, entry, target and macros."""
    digest = sources.digest(request.files())
    return _hash([digest, request.entry, request.source, request.arch, request.defines])


def entry_name(request: BuildRequest, nvrtc_path: str) -> str:
    """The directory name of a request's entry: every input of the compilation is in it."""
    key = _hash([image_key(request), options(request), nvrtc.identity(nvrtc_path), env.nvrtc_flags()])
    return f"{request.name}-{key[:24]}"


def read(entry: Path, owners: frozenset[int] | None = None) -> Build | None:
    """The build in an entry; None if it is missing, damaged or untrusted.

    `owners` are the users who may have written it: by default this one and root.
    """
    owners = trust.trusted_owners() if owners is None else owners
    try:
        trust.check_directory(entry, owners)
        found = json.loads(trust.read_file(entry / _INFO, owners, _MAX_RECORD_BYTES))
        cubin = trust.read_file(entry / _CUBIN, owners, _MAX_IMAGE_BYTES)
        ptx = trust.read_file(entry / _PTX, owners, _MAX_IMAGE_BYTES)
        problem = _damage(found, cubin, ptx)
        if not problem:
            return Build(cubin, ptx, found)
    except FileNotFoundError:
        if not entry.exists():
            return None
        problem = "a file is missing"
    except trust.UntrustedError as error:
        problem = str(error)
        warn_once(f"kernels in {entry.parent} are ignored, since a path {error.strerror}: {_UNTRUSTED_REMEDY}")
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    logger.info("cache entry %s is damaged: %s", entry, problem)
    return None


def write(entry: Path, build: Build, key: str) -> None:
    """Write an entry, all of it at once; a sound one of the same inputs stays, any other is replaced.

    No other user can write it, whatever the umask.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    entry.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    unique = uuid.uuid4().hex
    fresh, old = entry.parent / f".new-{unique}", entry.parent / f".old-{unique}"
    made = {**build.info, "image_key": key, "sha256": _digests(build.cubin, build.ptx)}
    try:
        fresh.mkdir(mode=0o755)
        _write_file(fresh / _CUBIN, build.cubin)
        _write_file(fresh / _PTX, build.ptx)
        _write_file(fresh / _INFO, json.dumps(made, indent=1).encode() + b"\n")
        for _ in range(3):  # another process may put its entry there in between
            if _equal(read(entry), made):
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry, old)
            with contextlib.suppress(OSError):
                os.rename(fresh, entry)
                return
            _remove(old)
        raise OSError(f"cannot put {entry} in place")
    finally:
        _remove(fresh)
        _remove(old)


def prebuilt(request: BuildRequest) -> Build | None:
    """The build that `MLA_CUPY_CUBIN_DIR` holds for `request`.

    It is matched by sources, target and macros and not by compiler, because images are built elsewhere. The owner of
    the directory is trusted, since the user has named it; others must not be able to write there.
    """
    given = env.get("CUBIN_DIR")
    if not given:
        return None
    directory = Path(given)
    try:
        owners = trust.trusted_owners(directory.stat().st_uid)
        trust.check_directory(Path(os.path.realpath(directory)), owners)
    except OSError as error:
        remedy = trust.remedy(error) or "name a directory that `mla-cupy compile --out` has written"
        warn_once(f"MLA_CUPY_CUBIN_DIR: {given} is ignored ({error.filename}: {error.strerror}); {remedy}")
        return None
    entry = directory / request.name
    if not os.path.lexists(entry):
        return None
    build = read(entry, owners)
    if build is not None and build.info["image_key"] == image_key(request):
        return build
    state = "is damaged or not trusted" if build is None else "was built from other sources"
    warn_once(f"MLA_CUPY_CUBIN_DIR: {entry} {state}; it is ignored, build it again with `mla-cupy compile --out`")
    return None


def usage() -> tuple[int, int]:
    """Number of entries, and their bytes."""
    count = size = 0
    for directory in dict.fromkeys(find_places().read):
        for file in directory.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may delete it meanwhile
                status = file.lstat()
                if stat.S_ISREG(status.st_mode):
                    count += file.name == _INFO
                    size += status.st_size
    return count, size


def clear() -> tuple[int, int]:
    """Delete every entry that we may delete; returns how many, and their bytes."""
    before = usage()
    for directory in dict.fromkeys(places().read):
        shutil.rmtree(directory, ignore_errors=True)
    after = usage()
    return before[0] - after[0], before[1] - after[1]


def warn_once(message: str) -> None:
    """Warn about the cache, once per process; each time if warnings are errors."""
    if message not in _warned:
        warnings.warn(f"mla_cupy: {message}", RuntimeWarning, stacklevel=2)
        _warned.add(message)


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
        trust.make_private(path)
        status = trust.check_directory(path, frozenset((os.geteuid(),)))
        if status.st_mode & 0o077:
            return None
        _prepare(path)
    except OSError:
        return None
    return path


def _prepare(path: Path) -> None:
    """Make the cache directory `path` with its directory of entries.

    Raises
    ------
    OSError
        If entries cannot be written there; an `UntrustedError` if another user could write them too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    trust.make_private(path)
    _check_trusted(path)
    trust.make_private(path / LAYOUT)
    trust.check_directory(path / LAYOUT, trust.trusted_owners())
    if not os.access(path / LAYOUT, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / LAYOUT))


def _check_trusted(path: Path) -> None:
    """Check a cache directory, which may be a link, if the link is trusted too."""
    owners = trust.trusted_owners()
    trust.check_owner(path, path.lstat(), owners)
    trust.check_directory(Path(os.path.realpath(path)), owners)


def _is_trusted(path: Path) -> bool:
    try:
        _check_trusted(path)
        trust.check_directory(path / LAYOUT, trust.trusted_owners())
    except OSError:
        return False
    return True


def _damage(found: Any, cubin: bytes, ptx: bytes) -> str:
    """Description of damage to the files of an entry, or ""."""
    if not isinstance(found, dict):
        return "its build info is no object"
    if found.get("sha256") != _digests(cubin, ptx):
        return "its digest is wrong"
    return build_info.problem(found, cubin, ptx)


def _write_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _remove(path: Path) -> None:
    """Delete a file, link or directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _equal(build: Build | None, made: dict[str, Any]) -> bool:
    """True if a build has the same inputs as the build with info `made`."""
    return build is not None and all(build.info.get(name) == made[name] for name in ("image_key", "nvrtc", "options"))


def _digests(cubin: bytes, ptx: bytes) -> dict[str, str]:
    return {_CUBIN: hashlib.sha256(cubin).hexdigest(), _PTX: hashlib.sha256(ptx).hexdigest()}


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
