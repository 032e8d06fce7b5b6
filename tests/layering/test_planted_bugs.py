"""Bugs that tests plant are still in the sources' words: most of those tests are slow, and seldom run."""

from __future__ import annotations

import importlib
from pathlib import Path

from mla_cupy.runtime.sources import source_root
from tests.support import mutants

ROOT = Path(__file__).resolve().parents[2]
MAX_TEXTS, MAX_MUTANTS = 1_163, 1_505


def test_what_a_mutant_replaces_is_there() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "Mutant(" in path.read_text() and path.parent.name not in ("support", "layering"):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    texts = {str(path.relative_to(source_root())): path.read_text() for path in source_root().rglob("*.cu*")}
    planted = [mutant for mutant in mutants.KNOWN if isinstance(mutant.old, str)]
    assert [f"{m.file}: {m.name}" for m in planted if str(m.old) not in texts.get(m.file, "")] == []
    assert len(planted) <= MAX_TEXTS, "each is a build, and a rename can lose it: plant a step, see mutants.steps"
    assert len(mutants.KNOWN) <= MAX_MUTANTS
