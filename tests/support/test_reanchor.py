"""Planted bugs follow what their texts have become."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import reanchor
from tests.reanchor import Anchored
from tests.support import mutants
from tests.support.mutants import Mutant

BEFORE = "void f() {\n    wait(full[stage]);\n    x = a[i] + b;\n    x = a[i] + b;\n}\n"


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (BEFORE.replace("full", "keys_full"), ("wait(keys_full[stage]);", "wait(keys_full[stage + 1]);")),
        ("// A line more.\n" + BEFORE.replace("stage", "slot"), ("wait(full[slot]);", "wait(full[slot + 1]);")),
        (BEFORE, ("wait(full[stage]);", "wait(full[stage + 1]);")),
        (BEFORE.replace("wait(full[stage]);", "wait(full[stage], parity);"), None),
        (BEFORE.replace("    wait(full[stage]);\n", ""), None),
    ],
)
def test_names_are_followed(after: str, found: tuple[str, str] | None) -> None:
    assert reanchor.follow(BEFORE, after, "wait(full[stage]);", "wait(full[stage + 1]);") == found


def test_one_name_that_becomes_two_is_not_followed() -> None:
    was, now = "    move(stage, stage);\n", "    move(stage, slot);\n"
    assert reanchor.follow(was, now, "move(stage, stage)", "move(stage, 0)") is None


@pytest.fixture
def mutant() -> Mutant:
    made = Mutant("a bug", "a.cuh", "x = 1;", "x = 2;")
    mutants.KNOWN.remove(made)  # it is in no kernel
    return made


def test_a_test_is_rewritten(mutant: Mutant) -> None:
    source = 'F = "a.cuh"\nM = [("b", 1), (Mutant("a bug", F, "x = 1;", "x = 2;"), 3)]  # é\n'
    assert reanchor.rewrite(source, mutant, Anchored("a.cuh", "y = 1;", "y = 2;")) == (
        'F = "a.cuh"\nM = [("b", 1), (Mutant("a bug", F, \'y = 1;\', \'y = 2;\'), 3)]  # é\n'
    )
    moved = reanchor.rewrite(source, mutant, Anchored("b.cuh", "x = 1;", "x = 2;"))
    assert moved is not None
    assert 'Mutant("a bug", \'b.cuh\', "x = 1;"' in moved


def test_what_is_no_literal_is_left(mutant: Mutant) -> None:
    source = 'OLD = "x = 1;"\nM = Mutant("a bug", "a.cuh", OLD, "x = 2;")\n'
    assert reanchor.rewrite(source, mutant, Anchored("a.cuh", "y = 1;", "y = 2;")) is None


def test_the_command_finds_every_text() -> None:
    """In a process of its own, as it is called: all bugs are known there, and none has lost its text."""
    command = [sys.executable, "-m", "tests.reanchor"]
    done = subprocess.run(command, cwd=reanchor.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "every planted bug has its text\n"), done.stderr
