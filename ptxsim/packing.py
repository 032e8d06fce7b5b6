"""Distributions that are the same bytes in every build, and editable installs, for `setup.py` here and of mla_cupy.

Dates come from SOURCE_DATE_EPOCH, or are a constant. Modes do not depend on the umask, nor owners on the
user.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

# The first day that a zip can name.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


class ReproducibleWheel(bdist_wheel):
    """Every file is 644, every directory 755."""

    def write_wheelfile(self, *args: Any, **kwargs: Any) -> None:
        """The last step before the tree is packed."""
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


class ReproducibleSdist(sdist):
    """Members in alphabetical order, without the user who built it."""

    def make_archive(self, base_name: str, format: str, *args: Any, base_dir: Any = None, **kwargs: Any) -> str:
        """Pack the tree, as a gzipped tar whatever `format` is."""
        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=_anonymous)
        return path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


class ReadableInstall(editable_wheel):  # type: ignore[misc]
    """An editable install that is one path entry instead of a hook that runs on import.

    Type checkers can read it. And a checkout on the path, whose folder `ptxsim` imports as an empty namespace, hides a
    hook, but no package that lies on the path.
    """

    def finalize_options(self) -> None:
        """The last step before setuptools looks at where packages lie."""
        self.distribution.packages = [self.distribution.get_name()]
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


COMMANDS = {"bdist_wheel": ReproducibleWheel, "sdist": ReproducibleSdist, "editable_wheel": ReadableInstall}
