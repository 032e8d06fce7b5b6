"""Bugs that tests plant are still in the sources' words: most of those tests are slow, and seldom run."""

from __future__ import annotations

from tests import reanchor


def test_what_a_mutant_replaces_is_there() -> None:
    """`python -m tests.reanchor` follows renames."""
    assert len(reanchor.known()) > 300
    assert reanchor.lost() == []
