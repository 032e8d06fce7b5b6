"""The simulated GPU of `mla_cupy.simulation`, by the name that the tests know it by."""

import ptxsim  # noqa: F401 (first, so that the package uses the copy that the tests import)
from mla_cupy.simulation import DEVICE, SimDriver, SimFamily, fake_gpu, simulated

__all__ = ["DEVICE", "SimDriver", "SimFamily", "fake_gpu", "simulated"]
