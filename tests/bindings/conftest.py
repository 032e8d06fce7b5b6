"""The bindings need JAX or PyTorch, and skip where it is not installed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# Before JAX counts its devices: four of them, over which calls are divided.
_FOUR = "--xla_force_host_platform_device_count=4"
if _FOUR not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FOUR}".strip()

from tests.interop.conftest import jax, jax_gpu, torch, torch_gpu  # noqa: E402, F401 (fixtures)


@pytest.fixture
def _numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays on the CPU are computed by the oracle, whatever GPU there is."""
    monkeypatch.setenv("MLA_CUPY_BACKEND", "numpy")


@pytest.fixture(scope="session")
def of_torch(torch: Any) -> Any:  # noqa: F811
    """`mla_cupy.torch`."""
    return importlib.import_module("mla_cupy.torch")


@pytest.fixture(scope="session")
def of_jax(jax: Any) -> Any:  # noqa: F811
    """`mla_cupy.jax`."""
    return importlib.import_module("mla_cupy.jax")


@pytest.fixture(params=["numpy", "jax", "torch"])
def library(request: pytest.FixtureRequest) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Conversions between arrays of a library and NumPy's."""
    if request.param == "numpy":
        return lambda x: x, np.asarray
    from tests.interop.test_jax import put
    from tests.interop.test_torch import array, tensor

    module = request.getfixturevalue(request.param)
    if request.param == "jax":
        return lambda x: put(module, [x], "cpu")[0], np.asarray
    return lambda x: tensor(module, x), lambda x: array(module, x)
