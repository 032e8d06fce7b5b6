"""Bugs that tests plant are still in the sources' words: most of those tests are slow, and seldom run."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from mla_cupy.runtime import sources
from tests.support import mutants

TESTS = Path(__file__).resolve().parents[1]


@cache
def source(file: str) -> str:
    return (sources.source_root() / file).read_text()


def test_what_a_mutant_replaces_is_there() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        if "Mutant(" in path.read_text():
            importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
    assert len(mutants.KNOWN) > 300
    assert [x for x in mutants.KNOWN if x.old not in source(x.file)] == []
