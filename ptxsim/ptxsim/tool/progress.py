"""A line on the terminal that shows the progress of a long launch."""

from __future__ import annotations

import time
from typing import TextIO

_DELAY, _EVERY = 2.0, 0.5
"""Seconds before the line appears, and between two changes of it."""


class ProgressLine:
    """Pass it as ``launch(..., progress=ProgressLine(sys.stderr))``; it stays silent in short launches."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.start = time.monotonic()
        self.next = self.start + _DELAY
        self.shown = 0

    def __call__(self, finished: int, total: int, steps: int) -> None:
        """Show how many clusters have finished, and how many basic blocks have been executed."""
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + _EVERY
        text = f"{finished} of {total} clusters, {steps:,} basic blocks, {now - self.start:.0f} s"
        self.stream.write("\r" + text.ljust(self.shown))
        self.stream.flush()
        self.shown = len(text)

    def clear(self) -> None:
        """Remove the line."""
        if self.shown:
            self.stream.write("\r" + " " * self.shown + "\r")
            self.stream.flush()
