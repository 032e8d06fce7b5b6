"""Arrays that are reached through DLPack: those of JAX, and those of any other library on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_cupy.arrays.cupy import cupy_family
from mla_cupy.arrays.numpy import NUMPY
from mla_cupy.arrays.view import Family, Native

CUDA_DEVICE_TYPE = 2
"""`kDLCUDA`."""


class JaxFamily:
    """JAX arrays, through DLPack, which also orders the streams. They cannot be written to."""

    name, mutable, takes_stream = "jax", False, False

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    @property
    def native(self) -> Native:
        return cupy_family() if self.on_gpu else NUMPY

    def adopt(self, x: Any) -> Any:
        return cupy_family().from_dlpack(x) if self.on_gpu else np.asarray(x)

    def release(self, x: Any) -> Any:
        import jax

        return jax.dlpack.from_dlpack(x) if self.on_gpu else jax.device_put(x, jax.devices("cpu")[0])


class DlpackFamily:
    """GPU arrays of any other library with DLPack: results are CuPy arrays."""

    name, on_gpu, mutable, takes_stream = "dlpack", True, True, False

    @property
    def native(self) -> Native:
        return cupy_family()

    def adopt(self, x: Any) -> Any:
        return cupy_family().from_dlpack(x)

    def release(self, x: Any) -> Any:
        return x


JAX: dict[bool, Family] = {on_gpu: JaxFamily(on_gpu) for on_gpu in (False, True)}
DLPACK: Family = DlpackFamily()
