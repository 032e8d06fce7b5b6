"""Bugs that tests plant are still in the sources' words: most of those tests are slow, and seldom run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from mla_cupy.runtime.sources import source_root
from tests.support import mutant_suite, mutants

ROOT = Path(__file__).resolve().parents[2]
MAX_TEXTS, MAX_BUGS = 100, 700


def test_texts_are_there_and_bugs_are_few() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"Mutant\(|mutant_suite\(", path.read_text()) and path.parent.name not in ("support", "layering"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    texts = {str(path.relative_to(source_root())): path.read_text() for path in source_root().rglob("*.cu*")}
    assert [f"{m.file}: {m.name}" for m in mutants.KNOWN if m.old not in texts.get(m.file, "")] == []
    assert len(mutants.KNOWN) <= MAX_TEXTS, "a rename can lose a text: leave out a step, see support/mutant_suite.py"
    assert len(mutants.KNOWN) + len(mutant_suite.KNOWN) <= MAX_BUGS
