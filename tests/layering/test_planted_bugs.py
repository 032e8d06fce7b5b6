"""Bugs that tests plant are still in the sources' words: most of those tests are slow, and seldom run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import reanchor
from tests.support import mutants
from tests.support.mutants import Mutant, steps


def test_what_a_mutant_replaces_is_there() -> None:
    """`python -m tests.reanchor` follows renames."""
    assert len(reanchor.known()) > 300
    assert reanchor.lost() == []


class Item:
    """What `thin_out` needs of a test."""

    def __init__(self, mutant: Mutant | None, test: str = "test", slow: bool = False) -> None:
        self.parent, self.originalname, self.slow = "file", test, slow
        if mutant:
            self.callspec = SimpleNamespace(params={"mode": "early", "mutant": mutant})

    def get_closest_marker(self, name: str) -> bool:
        return self.slow

    def add_marker(self, marker: Any) -> None:
        assert marker == pytest.mark.slow
        self.slow = True


def test_an_ordinary_run_plants_all_steps_and_one_text_of_twelve() -> None:
    texts = [Mutant(f"text {i}", "a.cu", f"{i}", "") for i in range(13)]
    items = [Item(None), *map(Item, [texts[0], Mutant("step", "a.cu", *steps("bar.sync", 0, of=1)), *texts[1:]])]
    twice = [Item(texts[1]), Item(texts[12])]
    other = [Item(texts[1], "other"), Item(texts[2], "chooses itself", slow=True), Item(texts[3], "chooses itself")]
    mutants.thin_out([*items, *twice, *other])
    assert [item.slow for item in items] == [False, False, False, *11 * [True], False]
    assert [item.slow for item in (*twice, *other)] == [True, False, False, True, False]
