"""Options, tables and progress of commands on a terminal. Every text is shown as it is: nothing in it is markup."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time of the first line of progress where there is no terminal, and between later ones."""
PIPE_WIDTH = 160
"""Columns of a file or a pipe, unless COLUMNS is set."""
LONG, SHORTENED = 28, 20
"""Cells longer than LONG wrap, in columns of at least SHORTENED characters."""


class Help(argparse.HelpFormatter):
    """Fills the paragraphs of a command's description; keeps indented lines, such as examples, if they fit."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for kept, group in itertools.groupby(text.splitlines(), lambda line: not line or line[0] == " "):
            block = list(group)
            lines += _examples(block, width) if kept else textwrap.wrap(" ".join(block), width)
        return "\n".join(lines)

    def _format_usage(self, *args: Any) -> str:
        usage = super()._format_usage(*args)
        if max(map(len, usage.splitlines()), default=0) <= self._width:
            return usage
        return "\n".join([*_wrapped(" ".join(usage.split()), self._width, "    "), "", ""])


def _examples(lines: Sequence[str], width: int) -> Iterator[str]:
    """Commands and their descriptions: side by side, or one above the other where that is too wide."""
    if max(map(len, lines)) <= width:
        yield from lines
        return
    for line in lines:
        command, text = ("", line) if line.startswith(" " * 8) else re.split(r"(?<=\S)  +|$", line, maxsplit=1)
        yield from _wrapped(command, width, "    ", " \\") if line else [""]
        yield from (f"      {part}" for part in _wrapped(text.strip(), width - 6))


def path(text: str) -> Path:
    """Type of an option that names a file or directory: "" names none, although `Path` reads it as the current one."""
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a path; name a file or directory")
    return Path(text)


def plain(text: object) -> str:
    """`text` with control characters, and characters that a terminal cannot show, as escape sequences."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in str(text)
    )


class Table:
    """A table for `show`. Where it does not fit the terminal, each row becomes a paragraph of "head: cell".

    The first `left` columns are aligned to the left, by default all of them.
    """

    def __init__(self, *heads: str, title: str = "", left: int | None = None) -> None:
        self.title, self.heads = title, heads
        self.rows: list[list[str]] = []
        self._left = len(heads) if left is None else left

    def add_row(self, *cells: object) -> None:
        """Add a row; cells that are left out are empty."""
        texts = [plain(cell) for cell in cells]
        self.rows.append(texts + [""] * (len(self.heads) - len(texts)))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the renderables for rich."""
        widths = [max(map(_width, cells)) for cells in zip(self.heads, *self.rows, strict=True)]
        needed = sum(SHORTENED if width > LONG else width for width in widths) + len(widths) - 1
        yield from [self.title] if self.title else []
        if needed <= options.max_width:
            yield self._grid(widths)
        else:
            yield "\n".join(self._paragraphs(options.max_width))

    def _grid(self, widths: Sequence[int]) -> Any:
        from rich import box
        from rich.table import Table as Grid

        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        for index, (head, width) in enumerate(zip(self.heads, widths, strict=True)):
            side: Any = "left" if index < self._left else "right"
            grid.add_column(head, justify=side, overflow="fold", no_wrap=width <= LONG)
        for row in self.rows:
            grid.add_row(*row)
        return grid

    def _paragraphs(self, width: int) -> Iterator[str]:
        for first, *others in self.rows:
            pairs = zip(self.heads[1:], others, strict=True)
            text = "; ".join(_unbroken(f"{head}: {cell}" if head else cell) for head, cell in pairs if cell)
            yield from _wrapped(first, width)
            yield from (f"  {line}" for line in _wrapped(text, width - 2))


def _unbroken(text: str) -> str:
    """`text` as one word, unless it is long."""
    return text.replace(" ", "\N{NO-BREAK SPACE}") if len(text) <= LONG else text


def _wrapped(text: str, width: int, indent: str = "", joint: str = "") -> list[str]:
    """The lines of a text, those behind the first indented; `joint` ends all but the last."""
    lines = textwrap.wrap(text, width - len(joint), subsequent_indent=indent, break_on_hyphens=False)
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
    return [f"{line}{joint}" for line in lines[:-1]] + lines[-1:]


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))


def table(title: str, heads: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table for `show`."""
    made = Table(*heads, title=title)
    for row in rows:
        made.add_row(*row)
    return made


def show(*tables: Table) -> None:
    """Print tables, with an empty line between two."""
    shown = console()
    for index, each in enumerate(tables):
        shown.print(*([""] if index else []), each)


def say(text: str) -> None:
    """Print prose, wrapped at the width of the terminal."""
    console().print(plain(text))


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str, bool], None]]:
    """A bar on standard error; the function reports the current work, and its end.

    On anything but a terminal, such as the log of a container build, it prints a plain line now and then, also while
    one piece of the work takes long.
    """
    if quiet:
        yield lambda name, done: None
    elif console(stderr=True).is_terminal:
        with _bar(what, total) as advance:
            yield advance
    else:
        lines = _Lines(what, total)
        try:
            yield lines.advance
        finally:
            lines.end()


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[str, bool], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Output meanwhile goes above the bar, but only if it goes to the terminal at all.
    above = sys.stdout.isatty()
    with Progress(*columns, console=console(stderr=True), transient=True, redirect_stdout=above) as shown:
        bar = shown.add_task(plain(what), total=total)
        yield lambda name, done: shown.update(bar, description=plain(name), advance=1 if done else 0)


class _Lines:
    """Lines of progress once the work takes long; and a last one, if there was any."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._begin = time.monotonic()
        self._finished = 0
        self._at_work: dict[str, None] = {}
        self._said = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self, name: str, done: bool) -> None:
        """Remember the current work."""
        if done:
            self._finished += 1
            self._at_work.pop(name, None)
        else:
            self._at_work[name] = None

    def end(self) -> None:
        """Report the end, if anything was reported."""
        self._ended.set()
        self._thread.join()
        if self._said:
            self._say()

    def _run(self) -> None:
        seconds = FIRST_LINE_SECONDS
        while not self._ended.wait(seconds):
            self._said = True
            self._say()
            seconds = LINE_SECONDS

    def _say(self) -> None:
        seconds = time.monotonic() - self._begin
        oldest = next(iter(self._at_work.copy()), None)
        now = "" if oldest is None else f", now {plain(oldest)}"
        text = f"{self._what}: {self._finished} of {self._total} done after {seconds:.0f} s{now}"
        print(text, file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    """Console for tables and prose, as wide as the terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = PIPE_WIDTH
    return made
