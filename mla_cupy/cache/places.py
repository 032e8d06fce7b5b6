"""Libraries and devices for a cache."""

from __future__ import annotations

import importlib
import re
from typing import Any

from mla_cupy.arrays import cupy_family
from mla_cupy.arrays.torch import torch_family
from mla_cupy.cache.in_jax import JaxMemory, default_place, device_at
from mla_cupy.cache.memory import DeviceMemory, HostMemory, Layout, Memory, TorchHostMemory
from mla_cupy.errors import ArgumentError, explain
from mla_cupy.ops import backend
from mla_cupy.ops.checks import is_integer
from mla_cupy.runtime import device as devices

LIBRARIES = ("numpy", "cupy", "torch", "jax")
_CUDA = re.compile(r"(?:cuda|gpu)(?::(\d+))?")


def memory_of(library: Any, device: Any, layout: Layout, host: type[HostMemory] = HostMemory) -> Memory:
    """Memory of a library and a device; `host` is the class for NumPy's arrays.

    Raises
    ------
    ArgumentError
        If the value is invalid, or the library has no arrays there.
    UnsupportedDeviceError
        If there is no such GPU.
    """
    if library is not None and library not in LIBRARIES:
        raise ArgumentError(explain("library", repr(library), f"{', '.join(LIBRARIES)} or None"))
    if library in ("torch", "jax"):
        _check_installed(library)
    place = _place(library, device)
    if library == "jax":
        return JaxMemory(layout, device_at(place))
    if place == "cpu":
        if library == "cupy":
            raise ArgumentError(explain("device", "'cpu'", "a GPU for library='cupy'", "library='numpy'"))
        return TorchHostMemory(layout) if library == "torch" else host(layout)
    if library == "numpy":
        raise ArgumentError(explain("device", repr(device), "'cpu' or None for library='numpy'", "library='cupy'"))
    ordinal = devices.describe(int(place)).ordinal
    return DeviceMemory(layout, torch_family() if library == "torch" else cupy_family(), ordinal)


def _check_installed(library: str) -> None:
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ArgumentError(
            explain("library", repr(library), "an installed one", f"pip install {library}: {error}")
        ) from error


def _place(library: Any, device: Any) -> int | str:
    """The CUDA ordinal, or "cpu"."""
    if device is None:
        if library == "numpy":
            return "cpu"
        if library == "jax":
            return default_place()
        if library == "torch":
            return torch_family().current_device()
        return cupy_family().current_device() if library == "cupy" or backend.use_gpu() else "cpu"
    name = str(device)  # also of a torch.device
    if name == "cpu":
        return "cpu"
    if named := _CUDA.fullmatch(name):
        return int(named[1] or 0)
    if not is_integer(device) or device < 0:
        raise ArgumentError(explain("device", repr(device), 'a CUDA ordinal, "cuda:N", "cpu" or None'))
    return int(device)
