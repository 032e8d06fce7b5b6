"""Every planted bug is caught by at least one mode; the unmutated kernels pass all of them (see test_hopper.py)."""

from __future__ import annotations

import pytest

from simtest.mutants.run import outcome
from simtest.mutants.table import MUTANTS, Mutant
from simtest.runners import MODES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.kernel}: {m.name}")
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert any(outcome(mutant, mode, seed) for mode, seed in reversed(MODES))
