"""Tests that leave out the steps of synchronisation of a kernel, one at a time: each must show in one of its runs.

    test_is_caught, test_as_it_is = mutant_suite(
        "decode_sm90_small", runs, {"bar.sync": (6, [0, 1, 4]), "fence.proxy.async": (2, [0, 1])}
    )

Of six barriers of the compiled kernel the first, the second and the fifth are left out, in the text's order. No name of
a source is in it. `python -m tools.mutants FILE` plants every step and prints those that show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest

import ptxsim
from mla_cupy.kernels import KERNELS
from mla_cupy.runtime import loader
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.launching import LoadedKernel
from mla_cupy.simulation import SimDriver
from tests.support.mutants import CAUGHT, Mutant, Plant

Run = Callable[[], object]
"""Simulates calls and asserts that their results are right."""
Table = Mapping[str, tuple[int, Sequence[int]]]
"""Kind of a step -> how many the kernel has, and the places of those that are left out in turn."""
KINDS = (
    *("bar.sync", "bar.arrive", "barrier.cluster.arrive", "barrier.cluster.wait", "mbarrier.try_wait"),
    "mbarrier.test_wait",
    *("mbarrier.arrive", "fence.proxy", "fence.mbarrier_init", "fence.acq_rel", "membar"),
    *("cp.async.wait_group", "cp.async.wait_all", "cp.async.commit_group", "cp.async.mbarrier"),
    *("cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "wgmma.fence", "wgmma.commit_group"),
    *("wgmma.wait_group", "tcgen05.commit", "tcgen05.wait::ld", "tcgen05.wait::st"),
    *("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"),
)
"""Beginnings of the opcodes of all steps that can be left out."""


KNOWN: list[Step] = []
"""Steps that suites of imported modules leave out."""


@dataclass(frozen=True)
class Step:
    """A step of a kernel: the one at `place` of the `of` that are of this kind."""

    kernel: str
    kind: str
    place: int
    of: int

    @property
    def id(self) -> str:
        """Id of the test."""
        return f"{self.kind}-{self.place}"


def mutant_suite(
    kernel: str, runs: Sequence[Run], steps: Table, texts: Sequence[Mutant] = ()
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two tests: each bug shows in one of the runs, which are tried in turn; the kernel as it is passes all of them.

    `texts` are bugs of arithmetic, which replace a text of a source.
    """
    bugs: list[Step | Mutant] = [
        Step(kernel, kind, place, of) for kind, (of, places) in steps.items() for place in places
    ]
    KNOWN.extend(bug for bug in bugs if isinstance(bug, Step))
    bugs += texts

    @pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.id)
    def test_is_caught(bug: Step | Mutant, plant: Plant) -> None:
        if isinstance(bug, Step):
            with without(bug):
                assert shows(runs), f"nothing shows that {bug.kind} {bug.place} of {kernel} is left out"
        else:
            plant(bug)
            assert shows(runs), f"nothing shows {bug.name}"

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(len(runs)))
    def test_as_it_is(number: int) -> None:
        runs[number]()

    return test_is_caught, test_as_it_is


def shows(runs: Sequence[Run]) -> bool:
    """True if one of them fails by a wrong result or an error of the simulator."""
    for run in runs:
        try:
            run()
        except CAUGHT:
            return True
    return False


@contextmanager
def without(step: Step) -> Iterator[None]:
    """Within a with statement, the simulator loads the kernel without the step."""
    load, source, planted = SimDriver.load, KERNELS[step.kernel].source, []

    def load_without(driver: SimDriver, build: Build, device: int) -> LoadedKernel:
        loaded = load(driver, build, device)
        if build.info["source"] != source:
            return loaded
        module: Any = loaded.owner
        found = len(ptxsim.steps(module, build.entry, step.kind))
        if found != step.of:  # not an assertion: those catch bugs
            pytest.fail(f"{step.kernel} has {found} steps {step.kind}, not {step.of}: python -m tools.mutants")
        planted.append(step)
        return replace(loaded, owner=ptxsim.plant(module, build.entry, step.kind, [step.place], driver.memory))

    loader.forget()
    with mock.patch.object(SimDriver, "load", load_without):
        yield
    loader.forget()
    if not planted:
        pytest.fail(f"no run has loaded {step.kernel}")
