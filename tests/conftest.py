"""Shared by all tests: capabilities are probed, never assumed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("MLA_CUPY_JIT", "lazy")  # the import must not start compilers during the tests
if "PYTEST_XDIST_WORKER" in os.environ:
    # The threads of NumPy's and PyTorch's matrix products spin while they wait for one another: where not all of them
    # have a core of their own, a test that takes one second alone was seen to take thirty.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("COLUMNS", None)  # of the workers' own terminal, which output under test is not written to

from mla_cupy.ops.call import forget
from mla_cupy.runtime import device
from tests.support import sets
from tests.support.mutants import plant  # noqa: F401 (fixture)
from tests.support.recorder import place, recorder  # noqa: F401 (fixtures)


def pytest_configure() -> None:
    # Container images often set it; each of hundreds of processes would then recompile every module that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)  # before what is slow is deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _draw_alike()
    sets.mark_slow(items)
    if device.gpu_count() == 0 and "gpu" not in config.option.markexpr:  # to skip thousands takes a minute
        needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def _draw_alike() -> None:
    """Keep Hypothesis from looking for numbers to try in all modules that have been imported.

    That takes seconds in each process, and a change of any number there would change the examples of all tests.
    """
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """Exclude collected tests from garbage collection, which would otherwise take a sixth of a simulation."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def gpu() -> device.DeviceInfo:
    """The first GPU, where there is one."""
    if device.gpu_count() == 0:
        pytest.skip("no CUDA GPU")
    return device.describe(0)


@pytest.fixture(scope="session")
def hopper(gpu: device.DeviceInfo) -> device.DeviceInfo:
    """The first GPU, where it is a Hopper."""
    if gpu.arch != "sm_90a":
        pytest.skip(f"needs compute capability 9.0, {gpu.name} has {gpu.cc}")
    return gpu


@pytest.fixture(autouse=True)
def least_smem(request: pytest.FixtureRequest) -> Iterator[None]:
    """Little shared memory for the tests with the mark `in_99kb`."""
    if request.node.get_closest_marker("in_99kb") is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CUPY_SMEM_KB", "99")
        _look_again()
        yield
    _look_again()


def _look_again() -> None:
    """Forget the GPU's properties, and the calls that were configured by them."""
    device.describe.cache_clear()
    forget()
