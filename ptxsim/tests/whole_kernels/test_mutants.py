"""Every planted bug is caught by at least one mode; the unmutated kernels pass all of them (see test_ptxsim_hopper)."""

from __future__ import annotations

import pytest
from ptx_mutants import MUTANTS, Mutant
from ptx_runners import MODES
from run_mutants import outcome


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.kernel}: {m.name}")
def test_mutant_is_caught(mutant: Mutant) -> None:
    assert any(outcome(mutant, mode, seed) for mode, seed in reversed(MODES))
