"""Run probes in order, skip those that would say nothing, and survive the ones that hang or kill the context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Machine, Probe, UnfitError, stage

PASSED, FAILED, DIED, HUNG, SKIPPED, UNFIT = "passed", "failed", "died", "hung", "skipped", "unfit"
BAD = (FAILED, DIED, HUNG)
MAX_HANGS = 3
"""Hangs of a stage after which the rest is skipped: each costs its whole time limit, and more are likely."""
_MAX_MESSAGE = 600


@dataclass(frozen=True)
class Result:
    """What became of a probe.

    status
        "passed"; "failed": other values came out; "died": an error of the compiler, CUDA or the simulator; "hung";
        "skipped", because another one failed; "unfit": there is nothing to try here.
    message
        The first difference, the error, or why it was skipped.
    compared
        What was compared, and how.
    """

    name: str
    status: str
    seconds: float
    message: str = ""
    compared: str = ""


Execute = Callable[[Probe], Result]


def run(
    probes: Sequence[Probe],
    place: Place,
    keep_going: bool = False,
    tell: Callable[[str, Result | None], None] = lambda name, result: None,
) -> list[Result]:
    """Run probes in their order.

    Parameters
    ----------
    probes : sequence of Probe
    place : Place
        On a GPU they run in child processes.
    keep_going : bool
        Run also those that need one that has failed, and those of a stage in which several have hung.
    tell : callable
        Called with a name and None before a probe, and with its result after it.
    """
    results: list[Result] = []
    with executor(place) as execute:
        for probe in probes:
            tell(probe.name, None)
            reason = "" if keep_going else blocked(probe, results)
            result = Result(probe.name, SKIPPED, 0.0, reason) if reason else execute(probe)
            results.append(result)
            tell(probe.name, result)
    return results


def blocked(probe: Probe, results: Sequence[Result]) -> str:
    """Why a probe would say nothing after these results; empty if it would."""
    for result in results:
        if result.status in (*BAD, SKIPPED) and any(fnmatchcase(result.name, pattern) for pattern in probe.needs):
            return f"{result.name} {'was ' if result.status == SKIPPED else ''}{result.status}"
    mine = stage(probe.name)
    hung = sum(result.status == HUNG and stage(result.name) == mine for result in results)
    return f"{hung} probes of {mine} hung" if hung >= MAX_HANGS else ""


@contextmanager
def executor(place: Place) -> Iterator[Execute]:
    """What runs one probe: this process if it is simulated, children if there is a GPU."""
    if place.simulated:
        with opened(place) as machine:
            yield lambda probe: attempt(probe, machine)
    else:
        from mla_cupy.selftest.children import Children

        children = Children(place)
        try:
            yield children.run
        finally:
            children.close()


def attempt(probe: Probe, machine: Machine) -> Result:
    """Run a probe here; whatever it raises is a result."""
    start = time.perf_counter()

    def result(status: str, message: str = "", compared: str = "") -> Result:
        return Result(probe.name, status, round(time.perf_counter() - start, 3), message, compared)

    try:
        finding = probe.run(machine)
    except UnfitError as error:
        return result(UNFIT, str(error))
    except Exception as error:
        return result(DIED, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])
    return result(FAILED if finding.difference else PASSED, finding.difference, finding.compared)
