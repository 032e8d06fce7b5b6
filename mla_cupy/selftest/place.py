"""Machine that runs probes: their GPU, or the simulator."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mla_cupy.errors import UnsupportedDeviceError
from mla_cupy.runtime import device, env
from mla_cupy.runtime.remedies import INSTALL_CUPY
from mla_cupy.selftest.probe import ARCHS, Machine

DEFAULT_ARCH = "sm_100a"
SIMULATED_SMS = 2
SIMULATED_MODE = "late"
"""Asynchronous work is done as late as the rules allow: a missing wait shows."""


@dataclass(frozen=True)
class Place:
    """`gpu` is its name, or empty; then `reason` explains why the simulator runs instead, in `mode`."""

    arch: str
    gpu: str
    driver: str
    reason: str
    mode: str = SIMULATED_MODE

    @property
    def simulated(self) -> bool:
        """True if there is no GPU."""
        return not self.gpu


def default_arch() -> str:
    """Target of a GPU of this machine, if there are probes for it."""
    here = (arch for arch in device.nvml_archs() if arch in ARCHS)
    return next(here, DEFAULT_ARCH)


def find(arch: str, simulate: bool = False) -> Place:
    """The place for a target; creates no CUDA context in this process, which would outlive a hung kernel."""
    gpus = [] if env.gpus_hidden() else device.nvml_gpus()
    fitting = [gpu for gpu in gpus if gpu.arch == arch]
    driver = gpus[0].driver if gpus else "none"
    reason = ""
    if simulate:
        reason = "asked for"
    elif not fitting:
        others = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in gpus)
        reason = f"no {arch} GPU here" + (f", only {others}" if others else "")
    elif importlib.util.find_spec("cupy") is None:
        reason = f"{fitting[0].name} is here, but CuPy is not installed: {INSTALL_CUPY}"
    return Place(arch, "" if reason else fitting[0].name, driver, reason)


@contextmanager
def opened(place: Place) -> Iterator[Machine]:
    """The machine itself, within a with statement.

    Raises
    ------
    UnsupportedDeviceError
        If CUDA does not show the GPU that is here.
    """
    if place.simulated:
        from mla_cupy import simulation

        major, minor = divmod(int(place.arch.removeprefix("sm_").rstrip("af")), 10)
        with simulation.simulated(SIMULATED_SMS, (major, minor), place.mode):
            yield Machine(place.arch, simulation.DEVICE, True)
        return
    for ordinal in range(device.gpu_count()):
        if device.describe(ordinal).arch == place.arch:
            yield Machine(place.arch, ordinal, False)
            return
    raise UnsupportedDeviceError(f"CUDA shows no {place.arch} GPU to this process: check CUDA_VISIBLE_DEVICES")
