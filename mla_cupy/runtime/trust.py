"""Check that only this user could have written a file.

Compiled kernels are code: files that another user could have written are not run.

Parent directories are not checked. A user who may rename a directory in one of them can put another in its place, but
only one that is not ours.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

_OPEN = "can be written by other users"


class UntrustedError(OSError):
    """Another user could have written a file or directory."""


def remedy(error: OSError) -> str:
    """Return the remedy for the place in an error; "" if only another place helps."""
    if isinstance(error, UntrustedError):
        return f"make it yours alone (chmod go-w {shlex.quote(str(error.filename))})" if error.strerror == _OPEN else ""
    return f"make {error.filename} writable" if error.errno == errno.EACCES and error.filename else ""


def trusted_owners(*more: int) -> frozenset[int]:
    """This user, root, and `more`."""
    return frozenset((os.geteuid(), 0, *more))


def check_directory(path: Path, owners: frozenset[int]) -> os.stat_result:
    """Check that `path` is a directory, not a link, with contents that only `owners` could have written.

    In a directory with the sticky bit others can add files, but they own those.

    Raises
    ------
    OSError
        If it does not exist or cannot be inspected; an `UntrustedError` if it is not trusted.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    check_owner(path, status, owners)
    if not status.st_mode & stat.S_ISVTX:
        _check_mode(path, status)
    return status


def read_file(path: Path, owners: frozenset[int], max_bytes: int) -> bytes:
    """The content of a regular file, no link, that only `owners` could have written.

    Raises
    ------
    OSError
        If it does not exist, cannot be read or has more than `max_bytes`; an `UntrustedError` if it is not trusted.
    """
    # Without O_NONBLOCK opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        check_owner(path, status, owners)
        _check_mode(path, status)
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def make_private(path: Path) -> None:
    """Make the directory `path`, for this user only regardless of the umask, unless it exists.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    path.chmod(0o700)  # the umask may have taken our own permissions away


def check_owner(path: Path, status: os.stat_result, owners: frozenset[int]) -> None:
    """Check that a file or link with this status belongs to one of `owners`.

    Raises
    ------
    UntrustedError
        If it does not.
    """
    if status.st_uid not in owners:
        raise UntrustedError(errno.EPERM, "belongs to another user", str(path))


def _check_mode(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedError(errno.EPERM, _OPEN, str(path))
