"""Rules that production kernels bend: errors when strict, warnings (or nothing) when not."""

from __future__ import annotations

import functools

import ptx_compile
import ptx_runners
import ptxsim
import pytest
from ptx_mutants import MUTANTS
from run_mutants import DEFINES, arch_of

BENT = {
    "no fence after mbarrier init": True,
    "no wgmma fence": True,
    "store not waited for": True,
    "all warps read quadrant 0": True,
    "no after_thread_sync before the loads": False,
    "no before_thread_sync after the loads": False,
}
"""Mutant names, and whether the lenient run warns."""


@pytest.mark.parametrize("name", BENT)
def test_lenient_runs_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == name]
    source = mutant.apply((ptx_compile.KERNELS / f"{mutant.kernel}.cu").read_text())
    ptx = ptx_compile.compile_ptx(source, arch_of(mutant.kernel), None, DEFINES.get(mutant.kernel, ()))
    with pytest.raises(ptxsim.SimError):
        ptx_runners.RUNNERS[mutant.kernel](ptx, "late", 0)
    monkeypatch.setattr(ptxsim, "Module", functools.partial(ptxsim.Module, strict=False))
    if BENT[name]:
        with pytest.warns(ptxsim.StrictWarning):
            ptx_runners.RUNNERS[mutant.kernel](ptx, "late", 0)
    else:
        ptx_runners.RUNNERS[mutant.kernel](ptx, "late", 0)
