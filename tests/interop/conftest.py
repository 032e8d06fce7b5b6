"""Other libraries, where they are installed. Importing them may warn; that is theirs."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from mla_cupy.runtime.device import DeviceInfo


@pytest.fixture(scope="session")
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def torch_gpu(torch: Any, gpu: DeviceInfo) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no GPU")
    return torch


@pytest.fixture(scope="session")
def jax() -> Any:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("jax")


@pytest.fixture(scope="session")
def jax_gpu(jax: Any, gpu: DeviceInfo) -> Any:
    try:
        jax.devices("gpu")
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    return jax
