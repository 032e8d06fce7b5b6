"""What setup.cfg cannot say: all packages, file modes in a wheel that ignore the umask, a readable editable install."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.editable_wheel import editable_wheel

FOLDERS = {"mla_cupy": "mla_cupy", "mla_cupy.bench": "bench", "mla_cupy.ptxsim": "ptxsim/ptxsim"}
"""Packages with subpackages, and their folders, as in `package_dir`."""


def packages() -> Iterator[str]:
    """Yield the name of every package."""
    yield "mla_cupy.cuda_src"
    for name, folder in FOLDERS.items():
        for path in sorted(Path(folder).rglob("__init__.py")):
            yield ".".join([name, *path.parent.relative_to(folder).parts])


class ReproducibleWheel(bdist_wheel):
    """Every file is 644, every directory 755."""

    def write_wheelfile(self, *args: Any, **kwargs: Any) -> None:
        """The last step before the tree is packed."""
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


class ReadableInstall(editable_wheel):  # type: ignore[misc]
    """An editable install that type checkers can read: one path entry instead of a hook that runs on import.

    Setuptools writes a hook where `package_dir` puts packages elsewhere; `mla_cupy/__init__.py` finds these itself.
    """

    def finalize_options(self) -> None:
        """The last step before setuptools looks at where packages lie."""
        self.distribution.packages = ["mla_cupy"]
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


setup(packages=[*packages()], cmdclass={"bdist_wheel": ReproducibleWheel, "editable_wheel": ReadableInstall})
