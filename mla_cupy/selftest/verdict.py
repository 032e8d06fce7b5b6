"""Verdict on the kernels that have never run on hardware: a kernel is admitted if all of its probes pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import admission, device
from mla_cupy.runtime.build import BuildRequest
from mla_cupy.selftest import catalog
from mla_cupy.selftest.place import Place, opened
from mla_cupy.selftest.probe import Probe, stage
from mla_cupy.selftest.trial import PASSED, UNFIT, Result

CALLS = ("block", "kernel")
"""Stages with probes that run a kernel of the package; each must have passed at least once."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one kernel: `passed`, `failed`, or neither where something was left out; and why."""

    kernel: str
    passed: bool
    failed: bool
    reason: str = ""


def needed(kernel: str, probes: Sequence[Probe]) -> list[Probe]:
    """The probes of a kernel, and the probes that they need."""
    found: dict[str, Probe] = {}
    patterns = [f"{one}/{kernel}/*" for one in CALLS]
    while patterns:
        pattern = patterns.pop()
        for probe in probes:
            if fnmatchcase(probe.name, pattern) and probe.name not in found:
                found[probe.name] = probe
                patterns.extend(probe.needs)
    return list(found.values())


def judge(kernel: str, probes: Sequence[Probe], results: Sequence[Result]) -> Verdict:
    """Judge a kernel by results; `probes` are all that there are for the target."""
    outcome = {result.name: result.status for result in results}
    names = [probe.name for probe in needed(kernel, probes)]
    bad = [name for name in names if outcome.get(name, PASSED) not in (PASSED, UNFIT)]
    if bad:
        return Verdict(kernel, False, True, f"{bad[0]} {outcome[bad[0]]}")
    if left_out := [name for name in names if name not in outcome]:
        return Verdict(kernel, False, False, f"{len(left_out)} of its {len(names)} probes were left out")
    tried = {stage(name) for name in names if outcome[name] == PASSED}
    lacking = [one for one in CALLS if one not in tried]
    return Verdict(kernel, not lacking, False, f"no probe of a {lacking[0]} passed" if lacking else "")


def settle(place: Place, results: Sequence[Result]) -> list[str]:
    """Record what a run on a GPU admits and withdraws; returns lines that say so. A simulated run records nothing."""
    probes = catalog.probes(place.arch)
    verdicts = [judge(kernel, probes, results) for kernel in waiting(place.arch)]
    if place.simulated:
        return ["a run in the simulator admits no kernel"] if verdicts else []
    concerned = [one for one in verdicts if one.passed or one.failed]
    lines = [_line(one, place) for one in verdicts]
    if not concerned:
        return lines
    passed = {one.kernel: waiting(place.arch)[one.kernel] for one in concerned if one.passed}
    try:
        with opened(place) as machine:
            gpu = device.describe(machine.device).name
        here = admission.Conditions.here(gpu, place.arch)
        admission.write(here, passed, [one.kernel for one in concerned if one.failed])
    except OSError as error:
        lines.append(f"not recorded, so nothing changes: {error}; set MLA_CUPY_CACHE_DIR, or MLA_CUPY_ADMISSION=all")
    return lines


def waiting(arch: str) -> Mapping[str, BuildRequest]:
    """Kernels for a target that run by default only where they are admitted, and one build of each."""
    return {
        name: kernel.request(kernel.variants[0], arch)
        for name, kernel in KERNELS.items()
        if kernel.unproven and kernel.supports_arch(arch)
    }


def _line(verdict: Verdict, place: Place) -> str:
    where = f"on {place.gpu}, driver {place.driver}"
    if verdict.passed:
        return f"{verdict.kernel} is admitted {where}"
    if verdict.failed:
        return f"{verdict.kernel} is not admitted {where}: {verdict.reason}"
    return f"{verdict.kernel}: nothing changes, {verdict.reason}"
