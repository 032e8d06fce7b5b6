"""What setup.cfg cannot say: the file modes in a wheel do not depend on the umask that it is built under."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class ReproducibleWheel(bdist_wheel):
    """Every file is 644, every directory 755."""

    def write_wheelfile(self, *args: Any, **kwargs: Any) -> None:
        """The last step before the tree is packed."""
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


setup(cmdclass={"bdist_wheel": ReproducibleWheel})
