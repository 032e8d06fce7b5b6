"""Prints the mutant table of the test kernels: ``python -m simtest.mutants [part of a name]``, in ptxsim/tests."""

from __future__ import annotations

import sys

from simtest.mutants.run import outcome, row
from simtest.mutants.table import MUTANTS
from simtest.runners import MODES


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
