"""The engines' packages, as far as they are read here: their Python files, kept outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.engines.source import Package
from tests.engines.versions import VERSIONS

_LEFT_OUT = ("/multimodal_gen/", "/test/")
"""Parts of SGLang's wheel that have no attention backends of language models."""


def folder() -> Path:
    """Folder of the packages: `MLA_CUPY_ENGINES`, or the user's cache."""
    import platformdirs  # here: a source tree without its dependencies runs the rest

    return Path(os.environ.get("MLA_CUPY_ENGINES") or platformdirs.user_cache_path("mla_cupy_engines"))


def home(engine: str, version: str) -> Path:
    """The folder of one version: what would be on the path if it was installed."""
    return folder() / f"{engine}-{version}"


def there(engine: str) -> list[str]:
    """The versions that have been fetched, oldest first."""
    return [version for version in VERSIONS[engine] if home(engine, version).exists()]


def package(engine: str, version: str) -> Package:
    """A fetched version."""
    return Package(home(engine, version))


def fetch(engine: str, version: str) -> Path:
    """Download a wheel with pip and keep its Python files and its metadata; nothing if they are there."""
    target = home(engine, version)
    if target.exists():
        return target
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, f"{engine}=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        made = Path(scratch) / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(made, filter(_is_kept, archive.namelist()))
        made.rename(target)
    return target


def _is_kept(name: str) -> bool:
    if any(part in f"/{name}" for part in _LEFT_OUT):
        return False
    return name.endswith((".py", ".json")) or ".dist-info/" in name
