"""The help of the commands, as they print it: the directive `command-help COMMAND...`."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from tables import MarkdownDirective

from mla_cupy import cli


def help_of(command: list[str]) -> str:
    """Help text that `mla-cupy COMMAND --help` prints, 92 columns wide."""
    os.environ["COLUMNS"] = "92"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return printed.getvalue()


class CommandHelp(MarkdownDirective):
    """The help of one command."""

    optional_arguments = 4

    def markdown(self) -> str:
        """A block of text."""
        return f"```text\n{help_of(self.arguments)}\n```\n"


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
