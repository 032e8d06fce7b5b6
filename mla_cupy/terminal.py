"""Options, tables and progress of commands on a terminal. Every text is shown as it is: nothing in it is markup."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time of the first line of progress where there is no terminal, and between later ones."""


def path(text: str) -> Path:
    """Type of an option that names a file or directory: "" names none, although `Path` reads it as the current one."""
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a path; name a file or directory")
    return Path(text)


def plain(text: object) -> str:
    """`text` with what a terminal would act on, or cannot show, as escape sequences."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in str(text)
    )


def table(title: str, heads: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table for `show`."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for index, head in enumerate(heads):
        made.add_column(head, overflow="fold", no_wrap=index == 0)
    for row in rows:
        made.add_row(*map(plain, row))
    return made


def show(*tables: Table) -> None:
    """Print tables, with an empty line between two."""
    console = _console()
    if not console.is_terminal:  # a file or a pipe has no width: do not fold for one
        console.width = 160
    for index, each in enumerate(tables):
        console.print(*([""] if index else []), each)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str, bool], None]]:
    """A bar on standard error; the function says what is at work, and whether it is done.

    Where that is no terminal, such as the log of an image that is built, there is a plain line now and then, also while
    one piece of the work takes long.
    """
    if quiet:
        yield lambda name, done: None
    elif _console(stderr=True).is_terminal:
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
    # What is printed meanwhile goes above the bar, but only if it goes to the terminal at all.
    above = sys.stdout.isatty()
    with Progress(*columns, console=_console(stderr=True), transient=True, redirect_stdout=above) as shown:
        bar = shown.add_task(plain(what), total=total)
        yield lambda name, done: shown.update(bar, description=plain(name), advance=1 if done else 0)


class _Lines:
    """Lines of progress, from the time on when it takes long; and a last one, if there was any."""

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
        """Remember what is at work."""
        if done:
            self._finished += 1
            self._at_work.pop(name, None)
        else:
            self._at_work[name] = None

    def end(self) -> None:
        """Say it is over, if anything has been said."""
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


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
