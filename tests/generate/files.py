"""Files of which a part, or all, is written by a command: what they should hold, and how they come to hold it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Texts = dict[Path, str]
"""Path -> what the file should hold."""

BEGIN = "# ---- Written by `python -m tests.generate`: "
END = "# ---- End of what is written\n"


def with_block(text: str, name: str, block: str, indent: str = "") -> str:
    """A text whose block `name` is another one.

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
    """Python texts as ruff leaves them."""
    return {path: _ruff(text, path, root) if path.suffix == ".py" else text for path, text in texts.items()}


def _ruff(text: str, path: Path, root: Path) -> str:
    """Imports sorted, then formatted, by the rules of the repository."""
    name = ["--stdin-filename", str(path)]
    for command in (
        ["check", "--select", "I,RUF022", "--fix", "--quiet", *name, "-"],
        ["format", "--quiet", *name, "-"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command], cwd=root, input=text, capture_output=True, text=True, check=True
        )
        text = done.stdout
    return text


def outdated(root: Path, makers: Iterable[Callable[[Path], Texts]]) -> Texts:
    """The files under `root` that differ from what they should hold."""
    wanted: Texts = {}
    for make in makers:
        wanted |= make(root)
    return {path: text for path, text in formatted(wanted, root).items() if path.read_text() != text}
