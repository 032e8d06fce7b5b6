"""Tables and progress on a terminal. Every text is shown as it is: nothing in it is markup."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Time of the first line of progress where there is no terminal, and between later ones."""


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

    Where that is no terminal, such as the log of an image that is built, there is a plain line now and then.
    """
    if not quiet and not _console(stderr=True).is_terminal:
        yield _lines(what, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True, disable=quiet) as shown:
        bar = shown.add_task(plain(what), total=total)
        yield lambda name, done: shown.update(bar, description=plain(name), advance=1 if done else 0)


def _lines(what: str, total: int) -> Callable[[str, bool], None]:
    """Lines of progress, from the time on when it takes long."""
    begin = time.monotonic()
    due, finished = begin + FIRST_LINE_SECONDS, 0

    def advance(name: str, done: bool) -> None:
        nonlocal due, finished
        finished += done
        now = time.monotonic()
        if now >= due:
            due = now + LINE_SECONDS
            print(f"{what}: {finished} of {total} done after {now - begin:.0f} s", file=sys.stderr, flush=True)

    return advance


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)
