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


def changed(file: str) -> bool:
    """No kernel is as it was."""
    return False


def test_an_ordinary_run_plants_all_steps_and_one_text_of_twelve() -> None:
    texts = [Mutant(f"text {i}", "a.cu", f"{i}", "") for i in range(13)]
    items = [Item(None), *map(Item, [texts[0], Mutant("step", "a.cu", *steps("bar.sync", 0, of=1)), *texts[1:]])]
    twice = [Item(texts[1]), Item(texts[12])]
    other = [Item(texts[1], "other"), Item(texts[2], "chooses itself", slow=True), Item(texts[3], "chooses itself")]
    mutants.thin_out([*items, *twice, *other], changed)
    assert [item.slow for item in items] == [False, False, False, *11 * [True], False]
    assert [item.slow for item in (*twice, *other)] == [True, False, False, True, False]


def test_of_a_kernel_that_has_not_changed_one_step_of_four() -> None:
    left_out = [Mutant(f"step {i}", f"{'ab'[i % 2]}.cu", *steps("bar.sync", i, of=12)) for i in range(12)]
    items = [*map(Item, left_out), Item(left_out[2], "another")]
    mutants.thin_out(items, lambda file: file == "a.cu")
    assert [i for i, item in enumerate(items) if not item.slow] == [0, 1, 3, 5, 7, 8, 9, 11, 12]


def test_steps_of_kernels_that_have_not_changed_stand_for_texts() -> None:
    """Not for those of another source that has changed, nor beside steps of one."""
    step, other_step = (Mutant("step", file, *steps("bar.sync", 0, of=1)) for file in ("a.cu", "b.cu"))
    text, header, other = (Mutant("text", file, "old", "") for file in ("a.cu", "a.cuh", "b.cu"))
    tests = {
        "steps": (step, text, header),
        "no steps": (text, header),
        "a changed step": (step, other_step, text),
        "a changed text": (step, text, other),
    }
    items = {(test, mutant): Item(mutant, test) for test, planted in tests.items() for mutant in planted}
    mutants.thin_out(items.values(), lambda file: file != "b.cu")
    assert [key for key, item in items.items() if item.slow] == [
        *(("steps", mutant) for mutant in (text, header)),
        ("no steps", header),
        ("a changed text", other),
    ]
