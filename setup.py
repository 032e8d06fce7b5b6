"""What setup.cfg cannot say: all packages, reproducible distributions, a readable editable install."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, "ptxsim")

from packing import COMMANDS

FOLDERS = {"mla_cupy": "mla_cupy", "mla_cupy.bench": "bench"}
"""Packages with subpackages, and their folders, as in `package_dir`."""


def packages() -> Iterator[str]:
    """Yield the name of every package."""
    yield "mla_cupy.cuda_src"
    for name, folder in FOLDERS.items():
        for path in sorted(Path(folder).rglob("__init__.py")):
            yield ".".join([name, *path.parent.relative_to(folder).parts])


class ReadableInstall(editable_wheel):  # type: ignore[misc]
    """An editable install that type checkers can read: one path entry instead of a hook that runs on import.

    Setuptools writes a hook where `package_dir` puts packages elsewhere; `mla_cupy/__init__.py` finds these itself.
    """

    def finalize_options(self) -> None:
        """The last step before setuptools looks at where packages lie."""
        self.distribution.packages = ["mla_cupy"]
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


setup(packages=[*packages()], cmdclass={**COMMANDS, "editable_wheel": ReadableInstall})
