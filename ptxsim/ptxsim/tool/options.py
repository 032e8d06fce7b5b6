"""Values of command-line options: numbers, dimensions, and files to write."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import SimError
from ..rules import RULES

COLUMNS = 80
"""Width of help, and of reports on a terminal."""


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are not below ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from {least} on")
        return value

    return parse


def dims(text: str) -> tuple[int, ...]:
    """Parse one to three sizes."""
    parts = text.replace("x", ",").split(",")
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one to three sizes from 1 on, as 8 or 4x2")
    return tuple(map(int, parts))


def rules_help() -> str:
    """Return the rules that ``--allow`` accepts, each with a description of its breach."""
    width = max(map(len, RULES)) + 4
    lines = [
        textwrap.fill(text, COLUMNS, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
        for name, text in RULES.items()
    ]
    return "\n".join(["rules that --allow takes:", *lines])


class Parser(argparse.ArgumentParser):
    """A parser of a command that may take options before, between and after its arguments (``intermixed``)."""

    def __init__(self, *args: Any, intermixed: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.intermixed = intermixed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command's arguments."""
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # argparse calls this method again for options and for arguments
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of 80 columns at most, in which lists of arguments stay as they are written."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": min(COLUMNS, shutil.get_terminal_size().columns), **options})


def fitted(text: str, stream: Any) -> str:
    """Return a text with lines no longer than a terminal's; what goes to a file or a pipe is left alone."""
    if not stream.isatty():
        return text
    width = min(COLUMNS, shutil.get_terminal_size().columns)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4), **options)
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def check_writable(option: str, path: Path | None) -> None:
    """Raise SimError where a file cannot be written: before the work, rather than after it."""
    if path is None:
        return
    if path.is_dir():
        raise SimError(f"{option}: {str(path)!r} is a directory, expected a file to write")
    if "\0" in str(path):
        raise SimError(f"{option}: {str(path)!r} is no name of a file")
    if not path.parent.is_dir():
        raise SimError(f"{option}: {str(path)!r} cannot be written: there is no directory {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SimError(f"{option}: {str(path)!r} cannot be written: permission denied")


def written(option: str, path: Path, write: Callable[[], Any]) -> None:
    """Write a file; raise SimError that names it where that fails."""
    try:
        write()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SimError(f"{option}: {str(path)!r} cannot be written: {reason}") from error
