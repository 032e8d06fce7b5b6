"""Values of command-line options: numbers, dimensions, and files to write."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import SimError
from ..rules import RULES


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
    """Return the rules that ``--allow`` takes, a line each."""
    width = max(map(len, RULES))
    return "rules that --allow takes:\n" + "".join(f"  {name:{width}}  {text}\n" for name, text in RULES.items())


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
