"""Every probe, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from mla_cupy.errors import ArgumentError, explain
from mla_cupy.kernels.spec import KernelSpec
from mla_cupy.selftest import calls, copies, mma, mma_calls, pair, reductions, sparse_calls, tmem
from mla_cupy.selftest.probe import ARCHS, Probe, stage

#: The kernels of the probes, by name. They are not kernels of the package: nothing else compiles or launches them.
KERNELS: dict[str, KernelSpec[Any]] = {
    kernel.name: kernel
    for kernel in (tmem.KERNEL, mma.KERNEL, pair.KERNEL, copies.KERNEL, reductions.REDUCE, reductions.STMATRIX)
}


def probes(arch: str, pattern: str = "*") -> list[Probe]:
    """Probes for a target, with names that match a pattern: first instructions, then blocks, then kernels.

    Raises
    ------
    ArgumentError
        If there are no probes for the target, or none with such a name.
    """
    if arch not in ARCHS:
        raise ArgumentError(explain("--arch", repr(arch), "one of " + ", ".join(ARCHS)))
    every: Sequence[Probe] = (
        *tmem.PROBES,
        *mma.PROBES,
        *copies.PROBES,
        *pair.PROBES,
        *reductions.PROBES,
        *mma_calls.probes(),
        *sparse_calls.probes(),
        *calls.probes(),
    )
    of_arch = [probe for probe in every if arch in probe.archs]
    # Stages in order: the blocks of all kernels come before the first whole kernel.
    of_arch.sort(key=lambda probe: {"block": 1, "kernel": 2}.get(stage(probe.name), 0))
    found = [probe for probe in of_arch if fnmatchcase(probe.name, pattern)]
    if not found:
        remedy = f"`mla-cupy selftest --arch {arch} --list` shows them"
        raise ArgumentError(explain("--probes", repr(pattern), f"a pattern that matches a probe for {arch}", remedy))
    return found
