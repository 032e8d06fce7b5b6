"""Run probes in order, skip those that would say nothing, and survive the ones that hang or kill the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from mla_cupy.selftest.children import Children
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Probe, stage
from mla_cupy.selftest.trial import BAD, HUNG, SKIPPED, Result, attempt

MAX_HANGS = 3
"""Hangs of a stage after which the rest is skipped: each costs its whole time limit, and more are likely."""


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
        Also run probes that need a failed one, and the rest of a stage in which several have hung.
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
    """Reason that a probe would say nothing after these results; empty if it would."""
    for result in results:
        if result.status in (*BAD, SKIPPED) and any(fnmatchcase(result.name, pattern) for pattern in probe.needs):
            return f"{result.name} {'was ' if result.status == SKIPPED else ''}{result.status}"
    mine = stage(probe.name)
    hung = sum(result.status == HUNG and stage(result.name) == mine for result in results)
    return f"{hung} probes of {mine} hung" if hung >= MAX_HANGS else ""


@contextmanager
def executor(place: Place) -> Iterator[Execute]:
    """Executor of one probe: this process if it is simulated, children if there is a GPU."""
    if place.simulated:
        with opened(place) as machine:
            yield lambda probe: attempt(probe, machine)
    else:
        children = Children(place)
        try:
            yield children.run
        finally:
            children.close()
