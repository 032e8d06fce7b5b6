"""The simulated GPU of `mla_cupy.simulation`, as the tests use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import ptxsim  # noqa: F401 (first, so that the package uses the copy that the tests import)
from mla_cupy import simulation
from mla_cupy.runtime import loader, worker
from mla_cupy.runtime.build import Build
from mla_cupy.runtime.launching import LoadedKernel
from mla_cupy.simulation import DEVICE, SimDriver, SimFamily, fake_gpu


@contextmanager
def simulated(*arguments: Any, **options: Any) -> Iterator[SimDriver]:
    """`mla_cupy.simulation`'s driver, with kernels compiled in this process: starting a child takes as long as some
    compilations.
    """
    here = mock.patch.object(worker, "can_spawn", return_value=False)
    with here, simulation.simulated(*arguments, **options) as target:
        yield target


@contextmanager
def instead_of_waiting(instruction: str) -> Iterator[None]:
    """Within a with statement, kernels execute another instruction wherever they wait for their predecessor."""
    load = SimDriver.load

    def load_other(driver: SimDriver, build: Build, device: int) -> LoadedKernel:
        assert b"griddepcontrol.wait;" in build.ptx
        ptx = build.ptx.replace(b"griddepcontrol.wait;", instruction.encode())
        return load(driver, replace(build, ptx=ptx), device)

    loader.forget()
    with mock.patch.object(SimDriver, "load", load_other):
        yield
    loader.forget()


__all__ = ["DEVICE", "SimDriver", "SimFamily", "fake_gpu", "instead_of_waiting", "simulated"]
