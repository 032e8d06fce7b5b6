"""The simulated GPU of `mla_cupy.simulation`, as the tests use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ptxsim  # noqa: F401 (first, so that the package uses the copy that the tests import)
from mla_cupy import simulation
from mla_cupy.runtime import worker
from mla_cupy.simulation import DEVICE, SimDriver, SimFamily, fake_gpu


@contextmanager
def simulated(*arguments: Any, **options: Any) -> Iterator[SimDriver]:
    """`mla_cupy.simulation`'s driver, with kernels compiled in this process: starting a child takes as long as some
    compilations.
    """
    here = mock.patch.object(worker, "can_spawn", return_value=False)
    with here, simulation.simulated(*arguments, **options) as target:
        yield target


__all__ = ["DEVICE", "SimDriver", "SimFamily", "fake_gpu", "simulated"]
