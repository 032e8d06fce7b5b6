"""What setup.cfg cannot say: all packages, and how they are packed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup

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


setup(packages=[*packages()], cmdclass=COMMANDS)
