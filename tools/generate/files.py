"""Files that a command writes, in part or whole: their expected contents, and how they are updated."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from mla_cupy.errors import explain

Texts = dict[Path, str]
"""Path -> what the file should hold."""

BEGIN = "# ---- Written by `python -m tools.generate`: "
FIRST_PARTY = ("--config", 'lint.isort.known-first-party = ["mla_cupy"]')
"""Ruff sees by the folders which imports are the package's own: those are not all in a copy of a few files."""
END = "# ---- End of the generated part\n"


class RuffError(Exception):
    """Ruff is missing, or cannot read what was written."""


def with_block(text: str, name: str, block: str, indent: str = "") -> str:
    """A text with its block `name` replaced.

    Raises
    ------
    ValueError
        If the text has no such block, or several.
    """
    first = re.escape(f"{indent}{BEGIN}{name}\n")
    last = re.escape(indent + END)
    found = re.findall(f"{first}.*?{last}", text, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"{len(found)} blocks {name!r} instead of one")
    return text.replace(found[0], f"{indent}{BEGIN}{name}\n{block}{indent}{END}")


def formatted(texts: Texts, root: Path) -> Texts:
    """Python texts as ruff leaves them: imports sorted, then formatted, by the rules of the repository."""
    python = {path: text for path, text in texts.items() if path.suffix == ".py" and text}
    with tempfile.TemporaryDirectory() as folder:
        copies = {path: Path(folder) / path.relative_to(root) for path in python}
        shutil.copy(root / "ruff.toml", folder)
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(python[path])
        for command in (["check", "--select", "I,RUF022", "--fix", *FIRST_PARTY], ["format"]):
            whole = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", "."]
            done = subprocess.run(whole, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2]
                raise RuffError(explain("ruff", last, "success", "pip install -e '.[test]'"))
        return texts | {path: copy.read_text() for path, copy in copies.items()}


def outdated(root: Path, makers: Iterable[Callable[[Path], Texts]]) -> Texts:
    """The files under `root` that differ from what they should hold; an empty text for one that should not be."""
    wanted: Texts = {}
    for make in makers:
        wanted |= make(root)
    return {
        path: text
        for path, text in formatted(wanted, root).items()
        if (path.read_text() if path.exists() else "") != text
    }


def write(texts: Texts) -> None:
    """Write files, and remove those whose text is empty."""
    for path, text in texts.items():
        if text:
            path.write_text(text)
        else:
            path.unlink()
