"""Prints the mutant table: ``python run_mutants.py`` (every mutant in every mode, a letter for what caught it)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
import ptx_compile  # noqa: E402
import ptxsim  # noqa: E402
from ptx_mutants import MUTANTS, Mutant  # noqa: E402
from ptx_runners import MODES, RUNNERS  # noqa: E402

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
    source = mutant.apply((ptx_compile.KERNELS / f"{mutant.kernel}.cu").read_text())
    try:
        ptx = ptx_compile.compile_ptx(source, arch_of(mutant.kernel), None, DEFINES.get(mutant.kernel, ()))
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


def main() -> None:
    """Print one Markdown row per mutant."""
    print("| kernel | mutant | " + ", ".join(f"{m} {s}" for m, s in MODES) + " |\n|---|---|---|")
    caught = tried = 0
    for mutant in MUTANTS:
        if len(sys.argv) > 1 and sys.argv[1] not in f"{mutant.kernel} {mutant.name}":
            continue
        results = [outcome(mutant, mode, seed) for mode, seed in MODES]
        caught, tried = caught + any(results), tried + 1
        print(row(mutant.kernel, mutant.name, mutant.frozen, results))
    print(f"\n{caught} of {tried} caught")


if __name__ == "__main__":
    main()
