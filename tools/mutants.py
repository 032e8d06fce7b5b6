"""Plant every step of synchronisation of a kernel, and print the table of those that a test file's runs show.

The file has one or more lines `test_..., test_... = mutant_suite(kernel, runs, {...})`; the printed table replaces the
last argument. Of a kind with many steps, some are tried, at even distances.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import tests  # noqa: F401 (it finds the simulator)

import ptxsim  # isort: skip
from mla_cupy.kernels import KERNELS
from mla_cupy.simulation import SimDriver
from tests.support import mutant_suite
from tests.support.mutant_suite import KINDS, Step, shows, without


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    suites: list[tuple[str, Sequence[Any]]] = []

    module = ".".join(options.file.with_suffix("").parts)

    def noted(kernel: str, runs: Sequence[Any], *rest: Any) -> tuple[None, None]:
        if sys._getframe(1).f_globals["__name__"] == module:  # not a file that this one imports
            suites.append((kernel, runs))
        return None, None

    with mock.patch.object(mutant_suite, "mutant_suite", noted):
        importlib.import_module(module)
    for kernel, runs in suites:
        print(f"{kernel}: {{", flush=True)
        for kind, of in counts(kernel, runs).items():
            tried = range(of) if of <= options.most else [i * of // options.most for i in range(options.most)]
            caught = [place for place in tried if is_shown(Step(kernel, kind, place, of), runs)]
            print(f'    "{kind}": ({of}, {caught}),  # of {[*tried]}', flush=True)
        print("}", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    found.add_argument("file", type=Path, help="such as tests/decode/test_small_mutants.py")
    found.add_argument("--most", type=int, default=4, metavar="N", help="steps of a kind that are tried (default 4)")
    return found


def counts(kernel: str, runs: Sequence[Any]) -> dict[str, int]:
    """Number of steps of each kind in the kernel as the runs load it."""
    found: dict[str, int] = {}
    load = SimDriver.load

    def counted(driver: SimDriver, build: Any, device: int) -> Any:
        loaded = load(driver, build, device)
        if build.info["source"] == KERNELS[kernel].source and not found:
            module: Any = loaded.owner
            found.update({kind: len(ptxsim.steps(module, build.entry, kind)) for kind in KINDS})
        return loaded

    with mock.patch.object(SimDriver, "load", counted):
        for run in runs:
            run()
    return {kind: of for kind, of in found.items() if of}


def is_shown(step: Any, runs: Sequence[Any]) -> bool:
    """True if one of the runs shows that the step is missing."""
    with without(step):
        return shows(runs)


if __name__ == "__main__":
    sys.exit(main())
