"""Errors that stop a benchmark before it starts."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark cannot run or a file cannot be read; the message says what to do."""


class RefusedError(BenchError):
    """A peer's own checks refuse a case; the message is the reason in its row."""
