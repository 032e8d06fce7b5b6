"""Runs mutants of the test kernels, and writes the rows of the table: a letter per mode for what caught each."""

from __future__ import annotations

import ptxsim
from simtest import nvrtc
from simtest.mutants.table import Mutant
from simtest.runners import RUNNERS

LETTERS = {
    "RaceError": "R", "SyncError": "S", "PoisonError": "P", "MemoryFault": "M", "DescriptorError": "D",
    "DeadlockError": "H", "wrong result": "W", "": "-",
}  # fmt: skip
"""How the table tells what caught a mutant (H: it hangs)."""

DEFINES = {"blackwell_gemm": ("M=128", "N=64", "GROUP=1", "WS=0", "A_MN=0", "B_MN=0", "HALF=0")}


def arch_of(kernel: str) -> str:
    """Return the architecture a test kernel is written for."""
    return "sm_100a" if kernel.startswith("blackwell") else "sm_90a"


def outcome(mutant: Mutant, mode: str, seed: int) -> str:
    """Run a mutant in one mode and name the error that caught it ('' when it escaped)."""
    source = mutant.apply((nvrtc.KERNELS / f"{mutant.kernel}.cu").read_text())
    try:
        ptx = nvrtc.compile_ptx(source, arch_of(mutant.kernel), None, DEFINES.get(mutant.kernel, ()))
        RUNNERS[mutant.kernel](ptx, mode, seed)
    except ptxsim.SimError as error:
        return type(error).__name__
    except AssertionError:
        return "wrong result"
    return ""


def row(kernel: str, name: str, mark: int, results: list[str]) -> str:
    """Return a mutant's row of the table."""
    stars = " " + "*" * mark if mark else ""
    return f"| {kernel} | {name}{stars} | {' '.join(LETTERS[r] for r in results)} |"
