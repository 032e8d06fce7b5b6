"""The bindings need JAX or PyTorch, and skip where it is not installed."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

# Before JAX counts its devices: two of them, for shard_map.
_TWO = "--xla_force_host_platform_device_count=2"
if _TWO not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_TWO}".strip()

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
